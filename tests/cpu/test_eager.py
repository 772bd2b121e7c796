"""Tests engines on CPU: nothing compiles while they serve, no other program is needed, threads are as set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cpu.completions import complete
from cpu.stacks import Start
from dynamo_vllm.engine.process.cpu_threads import usable_cores
from dynamo_vllm.models import demo
from harness.stack import TESTS, Stack
from harness.warm import ENGINE_FLAGS

GUARD = ("--worker-extension-cls", "cpu.watched.RefusesToCompile")
WITHOUT_PROGRAMS = {"PATH": "/no-programs"}
"""Hides compilers, `lscpu`, `ps` and similar programs."""
BY_DEFAULT = max(1, usable_cores() - 1)
SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k and top-p": {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "seed": {"temperature": 1.0, "top_k": 5, "seed": 7},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {"11": -5}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs of the prompt": {"prompt_logprobs": 1},
    "several": {"n": 3, "temperature": 1.0},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}},
    "regex": {"guided_regex": "(yes|no)"},
}


def guarded(start: Start, threads: str, watched: Path) -> Stack:
    env = {"OMP_NUM_THREADS": threads, "WATCHED_THREADS": str(watched)}
    return start(*GUARD, model=demo.folder("chat"), settings=WITHOUT_PROGRAMS | env)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the number of threads that the engine core computes with."""
    return tmp_path_factory.mktemp("watched") / "threads"


@pytest.fixture(scope="module")
def served(start_module: Start, watched: Path) -> Stack:
    return guarded(start_module, "", watched)


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_asking_compiles_anything(served: Stack, way: str) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 8}
    answer = served.post("/v1/chat/completions", asked | WAYS[way])
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == WAYS[way].get("n", 1)


def test_forked_engine_core_computes_with_the_threads_that_were_chosen(
    served: Stack, watched: Path, start: Start, tmp_path: Path
) -> None:
    """OpenMP was loaded with one thread, in the process that the core was forked from."""
    assert watched.read_text() == str(BY_DEFAULT)
    guarded(start, "3", tmp_path / "threads")
    assert (tmp_path / "threads").read_text() == "3"


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("", BY_DEFAULT)])
def test_spawned_engine_core_computes_with_the_threads_that_were_chosen(
    start: Start, tmp_path: Path, said: str, threads: int
) -> None:
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": said, "WATCHED_THREADS": str(tmp_path / "threads"), "PYTHONPATH": paths}
    made = start.frontend(**WITHOUT_PROGRAMS, **env)
    made.start_worker("--model", str(demo.folder("chat")), *ENGINE_FLAGS, *GUARD)
    made.wait_ready(200)
    assert (tmp_path / "threads").read_text() == str(threads)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_model_that_cannot_be_compiled_runs_eagerly(start: Start, tmp_path: Path) -> None:
    """The user asked for compilation on a machine without a compiler."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    made = start("--no-enforce-eager", settings=WITHOUT_PROGRAMS | caches)
    log = made.workers[0].log.read_text()
    assert "the model could not be compiled and runs eagerly: " in log
    assert complete(made, [20, 21], 4).tokens == 4
