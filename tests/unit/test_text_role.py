"""Text mode over the fake engine: OpenAI bodies in, OpenAI chunks out."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm.engine.fake import FakeEngine, FakeSpec
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.roles.text import AggregatedText
from harness.fakes import outputs


async def role() -> tuple[AggregatedText, FakeEngine]:
    engine = FakeEngine(FakeSpec(), lambda figures: None, lambda phase: None)
    return AggregatedText(await engine.start(), engine, "m"), engine


async def answer(body: dict[str, Any]) -> list[dict[str, Any]]:
    made, engine = await role()
    request = made.parse(body)
    job = await made.prepare(request, "j")
    encoder = made.encoder(request, job)
    return list(map(encoder.encode, await outputs(engine, job)))


async def test_chat_chunks() -> None:
    chunks = await answer({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    assert [c["object"] for c in chunks] == ["chat.completion.chunk"] * 2
    assert [c["choices"][0]["delta"].get("role") for c in chunks] == ["assistant", None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 2


async def test_completion_chunks_with_logprobs() -> None:
    chunks = await answer({"prompt": "hi", "max_tokens": 2, "logprobs": 1})
    assert all(c["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] for c in chunks)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": "a", "nvext": {"cache_salt": 7}}, "cache_salt"),
        ({"messages": [{}], "chat_template_kwargs": {"chat_template": "x"}}, "own template"),
        ({"messages": [{}], "chat_template_args": {"chat_template": "x"}}, "own template"),
        ({"messages": [{}], "chat_template_kwargs": {"padding": "max_length"}}, "padding is the tokenizer's"),
        (
            {"messages": [{}], "chat_template_args": {"tokenizer_kwargs": {}}},
            "tokenizer_kwargs is the tokenizer's",
        ),
    ],
)
async def test_refused_by_name(body: dict[str, Any], named: str) -> None:
    made, _ = await role()
    with pytest.raises(InvalidRequest, match=named):
        await made.prepare(made.parse(body), "j")


async def test_salt_goes_with_the_job() -> None:
    made, _ = await role()
    salts = [
        (await made.prepare(made.parse({"prompt": "a", "nvext": nvext}), "j")).cache_salt
        for nvext in (None, {}, {"cache_salt": "mine"})
    ]
    assert salts == [None, None, "mine"]


async def test_health_check_is_a_request_it_takes() -> None:
    made, _ = await role()
    job = await made.prepare(made.parse(made.health_check()), "canary")
    assert job.sampling.max_tokens == 1


@pytest.mark.parametrize("name", ["chat_template_kwargs", "chat_template_args"])
async def test_wishes_for_the_template_reach_it_under_either_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made, engine = await role()
    seen: list[Any] = []

    async def render(messages: object, options: Any) -> list[int]:
        seen.append(options["kwargs"]["enable_thinking"])
        return [20]

    monkeypatch.setattr(engine, "render_chat", render)
    body = {"messages": [{"role": "user", "content": "hi"}], name: {"enable_thinking": False}}
    await made.prepare(made.parse(body), "j")
    assert seen == [False]
