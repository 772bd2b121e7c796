"""Tests that a request through HTTP, frontend and worker gives what bare AsyncLLM gives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from harness.stack import Stack, environment
from harness.warm import FORKED, Zygote

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
SPECIAL: list[dict[str, Any]] = [
    {"prompt": prompts()[6], "params": {"temperature": 0.8, "seed": 7, "n": 2, "max_tokens": 12}},
    {"prompt": prompts()[8], "params": {"temperature": 0.0, "max_tokens": 40, "stop": ["a", "e"]}},
    {
        "prompt": prompts()[9],
        "params": {"temperature": 0.0, "max_tokens": 60, "structured_outputs": {"json": SCHEMA}},
    },
    {
        "prompt": prompts()[10],
        "params": {
            "temperature": 0.0,
            "max_tokens": 20,
            "structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"},
        },
    },
    {
        "prompt": prompts()[11],
        "params": {"temperature": 0.0, "max_tokens": 20, "structured_outputs": {"choice": ["yes", "no"]}},
    },
    {
        "prompt": prompts()[12],
        "params": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3, "max_tokens": 16},
    },
    {
        "prompt": prompts()[13],
        "params": {
            "temperature": 0.0,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.4,
            "max_tokens": 24,
        },
    },
]
CASES = [{"prompt": p, "params": GREEDY} for p in prompts()] + SPECIAL


@pytest.fixture(scope="module")
def expected(
    warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "cases.json").write_text(json.dumps(CASES))
    args = [str(model), str(folder / "cases.json"), str(folder / "out.json")]
    child = warm.fork("cpu.reference:run", args, environment(folder, **FORKED), folder / "log")
    assert child.wait(300) == 0, (folder / "log").read_text()[-3000:]
    answers: list[list[dict[str, Any]]] = json.loads((folder / "out.json").read_text())
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
@pytest.mark.parametrize("way", [ask, ask_stream])
def test_equals_bare_vllm(
    one_worker: Stack, expected: list[list[dict[str, Any]]], number: int, way: Any
) -> None:
    found, wanted = way(one_worker, CASES[number]), expected[number]
    assert [c["text"] for c in found] == [c["text"] for c in wanted]
    assert [c["finish_reason"] for c in found] == [c["finish_reason"] for c in wanted]
    if wanted[0]["logprobs"]:
        for choice, reference in zip(found, wanted, strict=True):
            assert choice["logprobs"] == pytest.approx(reference["logprobs"], abs=1e-4)


def test_usage_counts_prompt_completion_and_cache(one_worker: Stack) -> None:
    prompt = [11 + i % 800 for i in range(640)]
    first = one_worker.openai.completions.create(model="tiny", prompt=prompt, max_tokens=4)
    again = one_worker.openai.completions.create(model="tiny", prompt=prompt, max_tokens=4)
    assert first.usage is not None and again.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (640, 4)
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 608


def test_max_tokens_defaults_to_what_fits(one_worker: Stack) -> None:
    answer = one_worker.post(
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "x " * 900}],
            "ignore_eos": True,
            "temperature": 0,
        },
    ).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 2048


def test_prompt_logprobs_come_with_the_answer(one_worker: Stack) -> None:
    """Chat answers have them at the top level, completions in nvext if requested."""
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "prompt_logprobs": 1,
    }
    answer = one_worker.post("/v1/chat/completions", chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    more = {"prompt_logprobs": 1, "nvext": {"extra_fields": ["engine_data"]}}
    body = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 2, **more}
    found = one_worker.post("/v1/completions", body).json()["nvext"]["engine_data"]["prompt_logprobs"]
    assert found[0] is None and "21" in found[1] and "22" in found[2]


def test_a_priority_is_taken_by_the_default_scheduler_too(one_worker: Stack) -> None:
    body = {"model": "tiny", "prompt": [20, 21], "max_tokens": 2, "nvext": {"agent_hints": {"priority": 5}}}
    assert one_worker.post("/v1/completions", body).status_code == 200
