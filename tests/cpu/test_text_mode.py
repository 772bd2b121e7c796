"""Tests text mode: with vLLM's tokenizer in the worker, the answers equal those of token mode."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cpu.completions import PATH, body, complete
from cpu.pairs import caller, request
from cpu.stacks import Shared
from cpu.streams import stream
from harness.stack import Stack
from harness.waiting import until


@pytest.fixture(scope="module")
def text_mode(shared: Shared) -> Stack:
    return shared("--use-vllm-tokenizer")


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
        {"extra_body": {"guided_grammar": 'root ::= "yes" | "no"'}},
    ],
)
def test_chat_equals_token_mode(text_mode: Stack, one_worker: Stack, more: dict[str, Any]) -> None:
    answers = [made.openai.chat.completions.create(**CHAT | more) for made in (text_mode, one_worker)]
    choices, expected = ([(c.message.content, c.finish_reason) for c in answer.choices] for answer in answers)
    assert choices == expected
    if "yes" in str(more):
        assert choices[0][0] in ("yes", "no")
    usages = {(answer.usage.prompt_tokens, answer.usage.completion_tokens) for answer in answers}
    assert len(usages) == 1


def test_streamed_chat_equals_unary(text_mode: Stack) -> None:
    unary = text_mode.openai.chat.completions.create(**CHAT)
    chunks = list(text_mode.openai.chat.completions.create(**CHAT, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == unary.choices[0].message.content


@pytest.mark.parametrize("prompt", ["once upon", [20, 21, 22]])
def test_completion_equals_token_mode(text_mode: Stack, one_worker: Stack, prompt: Any) -> None:
    choices = [
        complete(made, prompt, 12, logprobs=2).answer["choices"][0] for made in (text_mode, one_worker)
    ]
    assert choices[0]["text"] == choices[1]["text"]
    logprobs, expected = (choice["logprobs"]["token_logprobs"] for choice in choices)
    assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "x " * 3000}, "prompt"),
        ({"stop": list("abcde")}, "stop"),
        ({"best_of": 3}, "best_of"),
        ({"guided_grammar": "root ::= nowhere"}, "guided_grammar"),
        ({"prompt_embeds": "A" * 400}, "prompt_embeds: text mode takes text only"),
    ],
)
def test_refused_by_name(text_mode: Stack, change: dict[str, Any], message: str) -> None:
    answer = text_mode.post(PATH, body("a", 3) | change)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["message"]
    assert complete(text_mode, "a", 3).tokens == 3


def test_structural_tag_holds_in_both_modes(text_mode: Stack, one_worker: Stack, model: Path) -> None:
    """The frontend (1.6.1) refuses response_format of this type; other clients of the runtime may send it."""
    inside = {"type": "regex", "pattern": "[0-9]{3}"}
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "content": inside, "end": "</a>"},
    }
    text = {"prompt": "a", "max_tokens": 20, "temperature": 0, "response_format": tag}
    with caller(text_mode) as plane:
        chunks = plane.call("backend.generate", text)["chunks"]
    assert re.fullmatch("<a>[0-9]{3}</a>", "".join(chunk["choices"][0]["text"] for chunk in chunks))
    guided = {"temperature": 0.0, "guided_decoding": {"structural_tag": tag}}
    tokens = request([20, 21], sampling_options=guided, stop_conditions={"max_tokens": 20})
    with caller(one_worker) as plane:
        chunks = plane.call("backend.generate", tokens)["chunks"]
    ids = [token for chunk in chunks for token in chunk["token_ids"]]
    written = Tokenizer.from_file(str(model / "tokenizer.json")).decode(ids)
    assert re.fullmatch("<a>[0-9]{3}</a>", written)


@pytest.mark.parametrize("way", ["body", "header"])
def test_urgent_request_overtakes_another_in_the_engine(narrow: Stack, way: str) -> None:
    (worker,), ended = narrow.workers, []

    def ask(name: str, priority: int, max_tokens: int) -> None:
        hints = {"agent_hints": {"priority": priority}} if way == "body" else {}
        headers = {"x-dynamo-request-priority": str(priority)} if way == "header" else {}
        asked = body("once upon", max_tokens, nvext=hints)
        assert narrow.post(PATH, asked, headers=headers).status_code == 200
        ended.append(name)

    with ThreadPoolExecutor(2) as pool:
        with stream(narrow, 1, 1900):
            until("the first one", lambda: worker.busy() == 1)
            asked = [pool.submit(ask, "patient", 1, 100)]
            until("one that waits", lambda: worker.busy() == 2)
            asked.append(pool.submit(ask, "urgent", 9, 20))
            until("two that wait", lambda: worker.busy() == 3)
        for one in asked:
            one.result(60)
    assert ended == ["urgent", "patient"]


def test_logit_bias_reaches_the_engine(text_mode: Stack) -> None:
    answer = complete(text_mode, [20, 21], 3, logit_bias={"40": 100}, logprobs=0).answer
    assert len(set(answer["choices"][0]["logprobs"]["tokens"])) == 1


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_chat_that_cannot_fit_is_refused_before_it_is_tokenised(text_mode: Stack, as_parts: bool) -> None:
    """Only one thread tokenises: 9 MB made all others wait for 12 s, and the worker seemed to hang."""
    words = "lo " * 300_000
    content = [{"type": "text", "text": words}] if as_parts else words
    chat = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    answer = text_mode.post("/v1/chat/completions", chat)
    assert answer.status_code == 400
    assert "900000 characters" in answer.json()["message"]
