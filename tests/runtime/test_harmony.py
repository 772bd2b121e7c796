"""What GPT-OSS writes, taken apart by the frontend: thoughts, answer, calls of tools.

The runtime's parsers read a vocabulary of OpenAI's, and fetch it from the Internet unless a folder has it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import vocabulary
from harness.stack import Stack, stack
from runtime.conftest import fake

RECIPE = Path(__file__).parents[2] / "deploy" / "recipes" / "gpt-oss" / "20b" / "serve.yaml"
THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>It is four.<|return|>"
CALL = (
    f"{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"numbers": [2, 2]}<|call|>'
)
NUMBERS = {"type": "object", "properties": {"numbers": {"type": "array"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": NUMBERS}}]


@contextlib.contextmanager
def speaking(folder: Path, model: Path, encodings: Path) -> Iterator[Stack]:
    """A frontend and an engine that echoes, with the recipe's parsers."""
    (group,) = yaml.safe_load(RECIPE.read_text())["workers"]
    template = folder / "plain.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    parsers = [f"--{n.replace('_', '-')}={group[n]}" for n in ("tool_call_parser", "reasoning_parser")]
    words = (*fake(model, echo=True, vocab_size=1121), "--custom-jinja-template", str(template))
    with stack(folder) as made:
        made.start_frontend(env={vocabulary.FOLDER: str(encodings)})
        made.start_worker(*words, *parsers)
        yield made.wait_ready()


@pytest.fixture(scope="module")
def harmony(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with speaking(tmp_path_factory.mktemp("harmony"), model, vocabulary.folder()) as made:
        yield made


def said(made: Stack, text: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    """How it ended, and the whole message, streamed or not."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 400, **more}
    answer = made.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        (choice,) = answer.json()["choices"]
        return choice["finish_reason"], choice["message"]
    whole: dict[str, Any] = {}
    finish = None
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            finish = choice["finish_reason"] or finish
            for name, piece in choice["delta"].items():
                if piece:
                    whole[name] = whole[name] + piece if name in whole and name != "role" else piece
    return finish, whole


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_answer_are_apart(harmony: Stack, stream: bool) -> None:
    finish, message = said(harmony, ANSWER, stream=stream)
    assert (finish, message["reasoning_content"], message["content"]) == (
        "stop",
        "Two and two.",
        "It is four.",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_call_are_apart(harmony: Stack, stream: bool) -> None:
    finish, message = said(harmony, CALL, stream=stream, tools=TOOLS)
    assert (finish, message["reasoning_content"], message.get("content")) == (
        "tool_calls",
        "Two and two.",
        None,
    )
    ((name, arguments),) = [call["function"].values() for call in message["tool_calls"]]
    assert (name, json.loads(arguments)) == ("add", {"numbers": [2, 2]})


def test_without_the_vocabulary_calls_are_lost_and_the_log_says_why(model: Path, tmp_path: Path) -> None:
    """As the recipe tells; should a later runtime bring the vocabulary, it need not any more."""
    with_nothing = tmp_path / "empty"
    with_nothing.mkdir()
    with speaking(tmp_path, model, with_nothing) as made:
        finish, message = said(made, CALL, tools=TOOLS)
    assert (finish, message.get("tool_calls"), message.get("content")) == ("stop", None, None)
    assert "Failed to load Harmony encoding" in (tmp_path / "frontend.log").read_text()
