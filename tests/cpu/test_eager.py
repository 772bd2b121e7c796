"""Tests engines on CPU: nothing compiles while they serve, no other program is needed, threads are as set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.engine.process.cpu_threads import usable_cores
from dynamo_vllm.models import demo
from harness.stack import TESTS, Stack, stack
from harness.warm import ENGINE_FLAGS, Zygote

GUARD = ("--worker-extension-cls", "cpu.watched.RefusesToCompile")
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


def without_programs(folder: Path) -> dict[str, str]:
    """Hides compilers, `lscpu`, `ps` and similar programs."""
    return {"PATH": str(folder / "no-programs")}


@contextlib.contextmanager
def serving(warm: Zygote, folder: Path, **env: str) -> Iterator[Stack]:
    with stack(folder, **without_programs(folder), **env) as made:
        made.start_frontend()
        warm.start_worker(made, demo.folder("chat"), *GUARD)
        yield made.wait_ready(60)


@pytest.fixture(scope="module")
def guarded(warm: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serving(warm, tmp_path_factory.mktemp("guarded")) as made:
        yield made


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_asking_compiles_anything(guarded: Stack, way: str) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 8}
    found = guarded.post("/v1/chat/completions", asked | WAYS[way])
    assert found.status_code == 200, found.text
    assert len(found.json()["choices"]) == WAYS[way].get("n", 1)


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("", max(1, usable_cores() - 1))])
def test_forked_engine_core_computes_with_the_threads_that_were_chosen(
    warm: Zygote, tmp_path: Path, said: str, threads: int
) -> None:
    """OpenMP was loaded with one thread, in the process that the core was forked from."""
    watched = tmp_path / "threads"
    with serving(warm, tmp_path, OMP_NUM_THREADS=said, WATCHED_THREADS=str(watched)):
        assert watched.read_text() == str(threads)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("", max(1, usable_cores() - 1))])
def test_spawned_engine_core_computes_with_the_threads_that_were_chosen(
    tmp_path: Path, said: str, threads: int
) -> None:
    watched = tmp_path / "threads"
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": said, "WATCHED_THREADS": str(watched), "PYTHONPATH": paths}
    with stack(tmp_path, **without_programs(tmp_path), **env) as made:
        made.start_frontend()
        made.start_worker("--model", str(demo.folder("chat")), *ENGINE_FLAGS, *GUARD)
        made.wait_ready(200)
        assert watched.read_text() == str(threads)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_model_that_cannot_be_compiled_runs_eagerly(warm: Zygote, model: Path, tmp_path: Path) -> None:
    """The user asked for compilation on a machine without a compiler."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    with stack(tmp_path, **without_programs(tmp_path), **caches) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, "--no-enforce-eager")
        made.wait_ready(200)
        assert "the model could not be compiled and runs eagerly: " in worker.log.read_text()
        found = made.post("/v1/completions", {"model": "tiny", "prompt": [20, 21], "max_tokens": 4})
        assert found.status_code == 200, found.text
