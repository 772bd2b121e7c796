"""Tests text mode: with vLLM's tokenizer in the worker, the answers equal those of token mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from cpu.streams import stream
from harness.plane import plane
from harness.stack import Stack, stack
from harness.waiting import until
from harness.warm import Zygote


@pytest.fixture(scope="module")
def text_mode(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("text")) as made:
        made.start_frontend()
        warm.start_worker(made, model, "--use-vllm-tokenizer")
        yield made.wait_ready(120)


@pytest.fixture(scope="module")
def one_at_a_time(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("one-at-a-time")) as made:
        made.start_frontend()
        flags = ("--scheduling-policy", "priority", "--max-num-seqs", "1")
        warm.start_worker(made, model, "--use-vllm-tokenizer", *flags)
        yield made.wait_ready(120)


CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "tell me a story"}],
    "max_tokens": 20,
    "temperature": 0,
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": ["e"]},
        {"n": 2, "temperature": 0.8, "seed": 4},
        {"extra_body": {"guided_regex": "[0-9]{4}"}},
    ],
)
def test_chat_equals_token_mode(text_mode: Stack, one_worker: Stack, more: dict[str, Any]) -> None:
    texts = [made.openai.chat.completions.create(**{**CHAT, **more}) for made in (text_mode, one_worker)]
    found, wanted = ([(c.message.content, c.finish_reason) for c in answer.choices] for answer in texts)
    assert found == wanted
    assert texts[0].usage.prompt_tokens == texts[1].usage.prompt_tokens
    assert texts[0].usage.completion_tokens == texts[1].usage.completion_tokens


def test_prompt_embeddings_are_refused(text_mode: Stack) -> None:
    body = {"model": "tiny", "prompt": "a", "prompt_embeds": "A" * 400}
    answer = text_mode.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["message"] == "prompt_embeds: text mode takes text only"


def test_streamed_chat_equals_unary(text_mode: Stack) -> None:
    unary = text_mode.openai.chat.completions.create(**CHAT)
    chunks = list(text_mode.openai.chat.completions.create(**CHAT, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == unary.choices[0].message.content


@pytest.mark.parametrize("prompt", ["once upon", [20, 21, 22]])
def test_completion_equals_token_mode(text_mode: Stack, one_worker: Stack, prompt: Any) -> None:
    ask = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    found, wanted = (made.openai.completions.create(**ask).choices[0] for made in (text_mode, one_worker))
    assert found.text == wanted.text
    assert found.logprobs.token_logprobs == pytest.approx(wanted.logprobs.token_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": "x " * 3000}, "prompt"),
        ({"stop": list("abcde")}, "stop"),
        ({"best_of": 3}, "best_of"),
        ({"guided_grammar": "root ::= nowhere"}, "guided_grammar"),
    ],
)
def test_refused_by_name(text_mode: Stack, body: dict[str, Any], named: str) -> None:
    ask = {"model": "tiny", "prompt": "a", "max_tokens": 3, **body}
    answer = text_mode.post("/v1/completions", ask)
    assert answer.status_code == 400, answer.text
    assert named in answer.text
    assert (
        text_mode.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 3}).status_code
        == 200
    )


def test_grammar_holds_in_both_modes(text_mode: Stack, one_worker: Stack) -> None:
    ask = {**CHAT, "extra_body": {"guided_grammar": 'root ::= "yes" | "no"'}}
    said = [made.openai.chat.completions.create(**ask).choices[0].message for made in (text_mode, one_worker)]
    assert {message.content for message in said} <= {"yes", "no"}


def test_structural_tag_holds_in_both_modes(text_mode: Stack, one_worker: Stack, model: Path) -> None:
    """The frontend (1.6.1) refuses response_format of this type; other clients of the runtime may send it."""
    inside = {"type": "regex", "pattern": "[0-9]{3}"}
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "content": inside, "end": "</a>"},
    }
    text = {"prompt": "a", "max_tokens": 20, "temperature": 0, "response_format": tag}
    chunks = on_the_plane(text_mode, text)
    assert re.fullmatch("<a>[0-9]{3}</a>", "".join(chunk["choices"][0]["text"] for chunk in chunks))
    tokens = {
        "token_ids": [20, 21],
        "stop_conditions": {"max_tokens": 20},
        "sampling_options": {"temperature": 0.0, "guided_decoding": {"structural_tag": tag}},
    }
    ids = [token for chunk in on_the_plane(one_worker, tokens) for token in chunk["token_ids"]]
    written = Tokenizer.from_file(str(model / "tokenizer.json")).decode(ids)
    assert re.fullmatch("<a>[0-9]{3}</a>", written)


def on_the_plane(made: Stack, request: dict[str, Any]) -> list[dict[str, Any]]:
    with plane(made.environment(DYN_TCP_RPC_HOST="127.0.0.1")) as caller:
        chunks: list[dict[str, Any]] = caller.call("backend.generate", request)["chunks"]
        return chunks


def test_unknown_model(text_mode: Stack) -> None:
    with pytest.raises(openai.NotFoundError):
        text_mode.openai.chat.completions.create(**{**CHAT, "model": "nobody"})


@pytest.mark.parametrize("way", ["body", "header"])
def test_urgent_request_overtakes_another_in_the_engine(one_at_a_time: Stack, way: str) -> None:
    (worker,), ended = one_at_a_time.workers, []

    def ask(name: str, priority: int, max_tokens: int) -> None:
        body: dict[str, Any] = {"model": "tiny", "prompt": "once upon", "max_tokens": max_tokens}
        body["ignore_eos"] = True
        headers = {"x-dynamo-request-priority": str(priority)} if way == "header" else {}
        if way == "body":
            body["nvext"] = {"agent_hints": {"priority": priority}}
        assert one_at_a_time.post("/v1/completions", body, headers=headers).status_code == 200
        ended.append(name)

    with ThreadPoolExecutor(2) as pool:
        with stream(one_at_a_time, 1, 1900):
            until("the first one", lambda: worker.busy() == 1)
            asked = [pool.submit(ask, "patient", 1, 400)]
            until("one that waits", lambda: worker.busy() == 2)
            asked.append(pool.submit(ask, "urgent", 9, 20))
            until("two that wait", lambda: worker.busy() == 3)
        for one in asked:
            one.result(60)
    assert ended == ["urgent", "patient"]


def test_logit_bias_reaches_the_engine(text_mode: Stack) -> None:
    ask = {"model": "tiny", "prompt": [20, 21], "max_tokens": 3, "temperature": 0, "logit_bias": {"40": 100}}
    answer = text_mode.openai.completions.create(**ask, logprobs=0)  # type: ignore[call-overload]
    assert len(set(answer.choices[0].logprobs.tokens)) == 1


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_chat_that_cannot_fit_is_refused_before_it_is_tokenised(text_mode: Stack, as_parts: bool) -> None:
    """Only one thread tokenises: 9 MB made all others wait for 12 s, and the worker seemed to hang."""
    words = "lo " * 300_000
    content = [{"type": "text", "text": words}] if as_parts else words
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    answer = text_mode.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "900000 characters" in answer.json()["message"]
