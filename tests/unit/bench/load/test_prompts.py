"""What is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_vllm.bench.load import trace
from dynamo_vllm.bench.load.prompts import Conversation, PromptSpec, as_random, shared_prefix


def spec(kind: str = "random", **more: Any) -> PromptSpec:
    base: dict[str, Any] = {"api": "completions", "input_tokens": 20, "output_tokens": 4, "vocab": (10, 900)}
    return PromptSpec(kind=kind, model="tiny", **base | more)


def body(asked: PromptSpec, number: int = 0, answers: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Conversation(asked, number).next_body(answers))
    return found


def test_request_asks_for_a_stream_of_full_length_with_usage() -> None:
    found = body(spec())
    prompt = found.pop("prompt")
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    assert found == {"model": "tiny", "max_tokens": 4, "temperature": 0, **options}
    assert len(prompt) == 20 and all(10 <= token < 900 for token in prompt)
    more = body(spec(ignore_eos=False, more={"temperature": 0.7, "top_k": 3}))
    assert (more["temperature"], more["top_k"], "ignore_eos" in more) == (0.7, 3, False)
    (message,) = body(spec(api="chat"))["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 20


def test_prompts_differ_by_number_stage_and_seed_and_by_nothing_else() -> None:
    made = [body(spec(), 0), body(spec(), 1), body(spec(stage="1"), 0), body(spec(seed=2), 0)]
    assert len({str(found["prompt"]) for found in made}) == 4
    assert body(spec(), 1) == made[1]


def test_prefixes_are_shared_by_some_and_every_one_is_used() -> None:
    asked = spec("prefix", prefix_tokens=30, prefixes=3)
    prompts = [body(asked, number)["prompt"] for number in range(40)]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 3
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 40
    assert shared_prefix(asked, -1) == shared_prefix(asked, -1), "a warm-up has the prefixes of its stage"


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_next_turn_carries_what_was_said(api: str) -> None:
    talk = Conversation(spec("turns", turns=3, api=api), 0)
    assert (talk.turns, talk.keeps_text) == (3, True)
    first = json.loads(talk.next_body([]))
    second = json.loads(talk.next_body(["an answer"]))
    if api == "chat":
        assert second["messages"][0] == first["messages"][0]
        assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
        assert second["messages"][1]["content"] == "an answer"
        assert second["messages"][2] != second["messages"][0]
    else:
        assert second["prompt"].startswith(first["prompt"] + "\nan answer\n")


def test_trace_is_asked_with_its_own_lengths() -> None:
    request = trace.TraceRequest(0.0, 33, 7, [1, 2], 32)
    found = body(spec("trace", requests=[request]))
    assert found["prompt"] == trace.prompt_ids(request, 1, (10, 900))
    assert found["max_tokens"] == 7
    assert len(body(as_random(spec("trace", requests=[request])), -1)["prompt"]) == 20
