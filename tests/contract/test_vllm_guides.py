"""Tests the guide checker with vLLM's own validation and compilers, in processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from vllm.v1.structured_output import StructuredOutputManager

from dynamo_vllm import forking
from dynamo_vllm.engine.patches import grammar_steps, grammar_threads, guides
from dynamo_vllm.engine.patches.patch import installed
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.structured_output import vllm_grammars
from dynamo_vllm.engine.structured_output.checker import GuideChecker, Limits
from dynamo_vllm.engine.structured_output.checker_processes import Source
from dynamo_vllm.engine.vllm import arguments as vllm_arguments
from dynamo_vllm.engine.vllm import convert as vllm_convert
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import Guide, SamplingSpec
from dynamo_vllm.models import demo

Check = Callable[[Guide], Guide]
LIMITS = Limits(seconds=2.0, memory_bytes=64 << 20)
WEATHER = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": WEATHER, "end": "</f>"}],
    "triggers": ["<f"],
}


def some_of(k: int) -> dict[str, Any]:
    """Returns a schema of 29 bytes per property whose grammar grows with the square of their number."""
    properties = {f"p{i}": {"type": "integer"} for i in range(k)}
    return {"type": "object", "properties": properties, "minProperties": k // 4, "maxProperties": k // 2}


def config() -> Any:
    settings = EngineSettings(model=str(demo.folder("chat")), environment={})
    return vllm_arguments.create_config(vllm_arguments.resolve(settings).args, settings)


@contextlib.contextmanager
def checking(zygote: forking.Zygote, limits: Limits) -> Iterator[Check]:
    with asyncio.Runner() as runner:
        source = Source(vllm_grammars.LOAD, vllm_grammars.payload(config()), dict(os.environ))
        source.fork_from(zygote)
        checker = GuideChecker(source, limits)

        async def close() -> None:
            checker.close()

        runner.run(checker._quick._ready())  # loading may take longer than a guide may wait
        yield lambda guide: runner.run(checker.checked(guide))
        runner.run(close())


@pytest.fixture(scope="module")
def check(unpatched: forking.Zygote) -> Iterator[Check]:
    with checking(unpatched, LIMITS) as checked:
        yield checked


@pytest.mark.parametrize(
    ("guide", "backend"),
    [
        (Guide(json=WEATHER), "xgrammar"),
        (Guide(json='{"type": "object"}'), "xgrammar"),
        (Guide(json_object=True), "xgrammar"),
        (Guide(regex="[a-z]{8}"), "xgrammar"),
        (Guide(regex="(a{1,1000}){1,1000}"), "xgrammar"),
        (Guide(grammar='root ::= "a" root | "b"'), "xgrammar"),
        (Guide(structural_tag=json.dumps(TAG)), "xgrammar"),
        (Guide(json={**WEATHER, "properties": {"town": {"type": "integer", "multipleOf": 5}}}), "guidance"),
        (Guide(json=some_of(40)), "xgrammar"),
    ],
)
def test_honest_guides_come_through_as_they_are(check: Check, guide: Guide, backend: str) -> None:
    found = check(guide)
    assert found.backend == backend
    for name in ("json", "regex", "grammar", "structural_tag"):
        assert getattr(found, name) == getattr(guide, name)


def test_choices_become_the_grammar_that_the_engine_compiles(check: Check) -> None:
    found = check(Guide(choice=["yes", "no"]))
    assert found.choice is None and "yes" in (found.grammar or "")


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (Guide(regex="["), "guided_regex: "),
        (Guide(grammar="root ::= nowhere"), "guided_grammar: "),
        (Guide(json="no JSON"), "Invalid JSON"),
        (Guide(json={"type": "no type"}), "guided_json"),
        (Guide(structural_tag="{}"), "guided_structural_tag: "),
    ],
)
def test_what_vllm_refuses_is_refused_in_its_words(check: Check, guide: Guide, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check(guide)


HOSTILE = {
    "200 properties": Guide(json=some_of(200)),
    "6000 properties": Guide(json=some_of(6000)),
    "a tool's 800 properties": Guide(
        structural_tag=json.dumps(
            {**TAG, "structures": [{"begin": "<f>", "schema": some_of(800), "end": "</f>"}]}
        )
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_guides_are_refused_and_honest_ones_are_not(check: Check, name: str) -> None:
    with pytest.raises(InvalidRequest, match="takes more than (2 s|64 MB) to compile"):
        check(HOSTILE[name])
    assert check(Guide(regex=f"honest after {name}")).backend == "xgrammar"


def test_memory_is_what_a_guide_over_both_limits_runs_out_of_first(unpatched: forking.Zygote) -> None:
    with (
        checking(unpatched, Limits(seconds=60.0, memory_bytes=24 << 20)) as check,
        pytest.raises(InvalidRequest, match="takes more than 24 MB to compile"),
    ):
        check(Guide(json=some_of(800)))


def test_vllm_checks_no_guide_again_that_was_checked(check: Check) -> None:
    guides.skip_checked()
    checked = check(Guide(regex="x"))
    for guide in (checked, Guide(json=some_of(6000), backend="xgrammar")):
        params = vllm_convert.sampling_params(SamplingSpec(max_tokens=1, guide=guide))
        params._validate_structured_outputs(None, None, None)
        encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params))
        assert encoded["structured_outputs"]["_backend"] == "xgrammar", "the engine core reads it"


def test_engine_core_compiles_guides_side_by_side_and_behind_its_steps() -> None:
    grammar_threads.apply()
    manager = StructuredOutputManager(config())
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = manager.executor.submit(lambda: os.getpriority(os.PRIO_PROCESS, 0)).result(30)
    manager.executor.shutdown()
    assert found == min(19, own + grammar_threads.NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    assert manager.executor._max_workers >= grammar_threads.THREADS


@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(
            Guide(regex="(((a{0,9}){0,9}){0,9}){0,9}"),
            marks=pytest.mark.skipif(
                installed("xgrammar") == "0.2.7",
                reason="that of vLLM 0.31 takes 10 ms at most for one of the first 64 tokens, others 200",
            ),
        ),
        Guide(regex="(((((a{0,9}){0,9}){0,9}){0,9}){0,9}){0,9}"),
        Guide(grammar="root ::= r0 | r1\nr0 ::= ([a-z]{1,20} | r1)*\nr1 ::= ([a-z]{1,21} | r0)*"),
    ],
)
def test_guide_that_takes_long_for_each_token_is_refused(check: Check, guide: Guide) -> None:
    with pytest.raises(InvalidRequest, match="for each token|to compile"):
        check(guide)


def test_grammar_accepts_nothing_once_a_step_was_slow() -> None:
    class Grammar:
        def fill(self, seconds: float) -> None:
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass

        def accept(self, request_id: str, tokens: list[int]) -> bool:
            return bool(request_id and tokens)

    fill, accept = grammar_steps._timed(Grammar.fill), grammar_steps._unless_slow(Grammar.accept)
    grammar = Grammar()
    fill(grammar, 0.0)
    assert accept(grammar, "r", [1])
    fill(grammar, 1.5 * grammar_steps.STEP_SECONDS)
    assert not accept(grammar, "r", [1]) and accept(Grammar(), "r", [1])
