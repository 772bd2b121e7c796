"""Provides one zygote with vLLM and one tiny model for the whole tier."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu.lora import Expected, bare_answers
from dynamo_vllm.engine.machine import device
from dynamo_vllm.models.tiny import make_tiny_model
from harness.adapters import make_adapter
from harness.stack import TESTS, Stack, stack
from harness.warm import Zygote, zygote


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this tier with vLLM's CUDA build: it uses flags for CPU. The e2e tier tests the GPU."""
    if device() != "cpu":
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason="needs vLLM's CPU build"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with zygote(tmp_path_factory.mktemp("warm")) as made:
        yield made


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains small versions of all demo models, and returns what the training printed."""
    out = tmp_path_factory.mktemp("demo")
    subprocess.run(
        [sys.executable, TESTS.parent / "scripts" / "demo", "all", "--smoke", "--out", out],
        check=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # of small matrices two threads make no faster work
    )
    return out


@pytest.fixture(scope="module")
def one_worker(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Yields a frontend and one worker, which the tests of a module share."""
    with stack(tmp_path_factory.mktemp("one")) as made:
        made.start_frontend()
        warm.start_worker(made, model)
        yield made.wait_ready(120)


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Creates three adapters: a, b, and another one with the name b."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, model, seed=seed) for seed, name in enumerate("abc", 1)}


@pytest.fixture(scope="session")
def expected(
    warm: Zygote, model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Expected:
    return bare_answers(warm, model, adapters, tmp_path_factory.mktemp("reference"))
