"""Tests that a request through HTTP, frontend and worker gives what bare AsyncLLM gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cpu.children import Children
from cpu.completions import complete
from harness.stack import Stack

LENGTHS = (1, 2, 3, 5, 8, 13, 21, 31, 32, 33, 47, 63, 64, 65, 96, 128, 200, 333, 500, 800)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def prompts() -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(10, 900) for _ in range(length)] for length in LENGTHS]


GREEDY = {"temperature": 0.0, "max_tokens": 24, "logprobs": 1}
GUIDES = ({"json": SCHEMA}, {"regex": "[0-9]{3}-[a-f]{2}"}, {"choice": ["yes", "no"]})
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
SPECIAL: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 7, "n": 2, "max_tokens": 12},
    {"temperature": 0.0, "max_tokens": 40, "stop": ["a", "e"]},
    *({"temperature": 0.0, "max_tokens": 60, "structured_outputs": guide} for guide in GUIDES),
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3, "max_tokens": 16},
    {"temperature": 0.0, "max_tokens": 24, **PENALTIES},
]
CASES = [{"prompt": prompt, "params": GREEDY} for prompt in prompts()]
CASES += [
    {"prompt": prompt, "params": params} for prompt, params in zip(prompts()[7:], SPECIAL, strict=False)
]


@pytest.fixture(scope="module")
def expected(children: Children, model: Path) -> list[list[dict[str, Any]]]:
    answers: list[list[dict[str, Any]]] = children.ask("bare:completions", str(model), CASES)
    return answers


def body(case: dict[str, Any]) -> dict[str, Any]:
    params = dict(case["params"])
    guide = params.pop("structured_outputs", {})
    more = {f"guided_{kind}": value for kind, value in guide.items()}
    own = {k: params.pop(k) for k in ("top_k", "repetition_penalty") if k in params}
    return {"model": "tiny", "prompt": case["prompt"], **params, "extra_body": {**own, **more}}


def ask(stack: Stack, case: dict[str, Any]) -> list[dict[str, Any]]:
    answer = stack.openai.completions.create(**body(case))
    return [
        {
            "text": c.text,
            "finish_reason": c.finish_reason,
            "logprobs": c.logprobs.token_logprobs if c.logprobs else None,
        }
        for c in sorted(answer.choices, key=lambda c: c.index)
    ]


def ask_stream(stack: Stack, case: dict[str, Any]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for chunk in stack.openai.completions.create(**body(case), stream=True):
        for choice in chunk.choices:
            at = found.setdefault(choice.index, {"text": "", "finish_reason": None, "logprobs": []})
            at["text"] += choice.text
            at["finish_reason"] = choice.finish_reason or at["finish_reason"]
            if choice.logprobs and choice.logprobs.token_logprobs:
                at["logprobs"] += choice.logprobs.token_logprobs
    return [found[i] for i in sorted(found)]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_equals_bare_vllm(one_worker: Stack, expected: list[list[dict[str, Any]]], number: int) -> None:
    wanted = expected[number]
    for way in (ask, ask_stream):
        choices = way(one_worker, CASES[number])
        for key in ("text", "finish_reason"):
            assert [choice[key] for choice in choices] == [choice[key] for choice in wanted]
        if wanted[0]["logprobs"]:
            for choice, reference in zip(choices, wanted, strict=True):
                assert choice["logprobs"] == pytest.approx(reference["logprobs"], abs=1e-4)


def test_usage_counts_prompt_completion_and_cache(one_worker: Stack) -> None:
    prompt = [11 + i % 800 for i in range(640)]
    first, again = (complete(one_worker, prompt, 4) for _ in range(2))
    assert (first.prompt_tokens, first.tokens) == (640, 4)
    assert again.cached >= 608


def test_max_tokens_defaults_to_what_fits(one_worker: Stack) -> None:
    chat = {"messages": [{"role": "user", "content": "x " * 900}], "ignore_eos": True, "temperature": 0}
    answer = one_worker.post("/v1/chat/completions", {"model": "tiny", **chat}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 2048


def test_prompt_logprobs_come_with_the_answer(one_worker: Stack) -> None:
    """Chat answers have them at the top level, completions in nvext if requested."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt_logprobs": 1}
    answer = one_worker.post("/v1/chat/completions", {"model": "tiny", **chat}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    first, *others = complete(one_worker, [20, 21, 22], 2, prompt_logprobs=1).prompt_logprobs
    assert first is None and all(other and str(21 + at) in other for at, other in enumerate(others))


def test_a_priority_is_taken_by_the_default_scheduler_too(one_worker: Stack) -> None:
    assert complete(one_worker, [20, 21], 2, nvext={"agent_hints": {"priority": 5}}).tokens == 2
