"""Text mode: vLLM's tokenizer in the worker, the same answers as token mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from harness.stack import Stack, stack
from harness.warm import Zygote


@pytest.fixture(scope="module")
def text_mode(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("text")) as made:
        made.start_frontend()
        warm.start_worker(made, model, "--use-vllm-tokenizer")
        yield made.wait_ready(60)


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
    assert texts[0].usage.prompt_tokens == texts[1].usage.prompt_tokens  # type: ignore[union-attr]
    assert texts[0].usage.completion_tokens == texts[1].usage.completion_tokens  # type: ignore[union-attr]


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
    assert found.logprobs.token_logprobs == pytest.approx(wanted.logprobs.token_logprobs, abs=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": "x " * 3000}, "prompt"),
        ({"stop": list("abcde")}, "stop"),
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


def test_unknown_model(text_mode: Stack) -> None:
    with pytest.raises(openai.NotFoundError):
        text_mode.openai.chat.completions.create(**{**CHAT, "model": "nobody"})


def test_logit_bias_reaches_the_engine(text_mode: Stack) -> None:
    ask = {"model": "tiny", "prompt": [20, 21], "max_tokens": 3, "temperature": 0, "logit_bias": {"40": 100}}
    answer = text_mode.openai.completions.create(**ask, logprobs=0)  # type: ignore[call-overload]
    assert len(set(answer.choices[0].logprobs.tokens)) == 1


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_chat_that_cannot_fit_is_refused_before_it_is_tokenised(text_mode: Stack, as_parts: bool) -> None:
    """There is one thread for that: 9 MB kept all others waiting for 12 s, and the worker seemed to hang."""
    words = "lo " * 300_000
    content = [{"type": "text", "text": words}] if as_parts else words
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    answer = text_mode.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "900000 characters" in answer.json()["message"]
