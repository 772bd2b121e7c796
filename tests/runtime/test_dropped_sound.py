"""`input_audio`, which the frontend drops: refused over the real runtime, with the fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models.audio_input import make_tiny_audio_input_model

from harness.stack import Stack
from runtime.conftest import StartFake

HEARS = {"media": {"audio": 2}}
TEXT = {"type": "text", "text": "ba be"}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "ba be"}],
    [{"role": "system", "content": "bo"}, {"role": "user", "content": [TEXT, TEXT]}],
    [
        {"role": "user", "content": "ba"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "bu"},
    ],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_audio_input_model(tmp_path_factory.mktemp("model") / "tiny")


def named(name: str) -> tuple[str, ...]:
    return ("--served-model-name", name, "--component", name, "--enable-multimodal")


def with_several_templates(folder: Path) -> Path:
    """A model whose chats may have sounds that nobody misses."""
    several = make_tiny_audio_input_model(folder / "several")
    (several / "chat_template.jinja").unlink()
    path = several / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": name, "template": config["chat_template"]} for name in ("default", "tool_use")]
    path.write_text(json.dumps({**config, "chat_template": named}))
    return several


def test_refused_and_other_chats_are_as_before(
    deployment: Stack, start_fake: StartFake, tmp_path: Path, model: Path
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text((model / "chat_template.jinja").read_text().replace("<|im_end|>", "<|im_end|> "))
    start_fake(*named("hears"), **HEARS)
    start_fake(*named("hears"), **HEARS)  # of the same card, or the frontend would reject it
    start_fake(*named("with-own"), "--custom-jinja-template", str(own), **HEARS)
    start_fake(*named("deaf"))
    several = start_fake(*named("several"), "--model", str(with_several_templates(tmp_path)), **HEARS)
    deployment.wait_ready().wait_listed("hears", "with-own", "deaf", "several")

    def ask(name: str, messages: list[dict[str, Any]], status: int = 200) -> Any:
        found = deployment.post(
            "/v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 4}
        )
        assert found.status_code == status, found.text
        return found.json()

    for chat in CHATS:
        answers = [ask(name, chat) for name in ("hears", "deaf")]
        assert [a["usage"]["prompt_tokens"] for a in answers] == [answers[0]["usage"]["prompt_tokens"]] * 2
        assert len({a["choices"][0]["message"]["content"] for a in answers}) == 1
        assert ask("with-own", chat)["usage"]["prompt_tokens"] > answers[0]["usage"]["prompt_tokens"]
    for name in ("hears", "with-own"):
        for content in ([SOUND], [TEXT, SOUND]):
            refused = ask(name, [{"role": "user", "content": content}, *CHATS[0]], 400)
            assert "send audio_url with a data: URL" in refused["message"]
    assert several.log.read_text().count("the frontend drops input_audio") == 1
    assert "incompatible" not in (deployment.folder / "frontend.log").read_text()
