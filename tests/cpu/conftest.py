"""Provides one zygote with vLLM, one tiny model, and the deployments that modules share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu.children import Children
from cpu.lora import Expected, bare_answers
from cpu.pairs import Pairs
from cpu.stacks import Shared, Start, starting
from dynamo_vllm.engine.machine import device
from dynamo_vllm.models.tiny import make_tiny_model
from harness.adapters import make_adapter
from harness.otlp import Receiver, receiver
from harness.processes import free_port
from harness.stack import TESTS, Stack
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
def children(warm: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Children:
    return Children(warm, tmp_path_factory)


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


@pytest.fixture
def start(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts stacks that end with the test."""
    with starting(warm, model, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def start_module(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts stacks that end with the module."""
    with starting(warm, model, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def shared(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with starting(warm, model, tmp_path_factory) as start:
        yield Shared(start)


@pytest.fixture(scope="module")
def one_worker(shared: Shared) -> Stack:
    """A worker as it is without any flag."""
    return shared()


@pytest.fixture(scope="module")
def narrow(shared: Shared) -> Stack:
    """Runs one request at a time, the urgent ones first, and a prefill in many small steps."""
    return shared(
        *("--max-num-seqs", "1", "--max-num-batched-tokens", "32", "--scheduling-policy", "priority")
    )


@pytest.fixture(scope="session")
def event_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def embeds_worker(shared: Shared, event_port: int) -> Stack:
    """Takes prompt embeddings, no images though told to, and has its KV events at a port of the user."""
    return shared("--enable-prompt-embeds", "--enable-multimodal", "--kv-event-port", str(event_port))


@pytest.fixture(scope="session")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    with receiver(tmp_path_factory.mktemp("spans")) as made:
        yield made


@pytest.fixture(scope="module")
def pair(shared: Shared, spans: Receiver) -> Pairs:
    """A prefill and a decode worker, whose engines trace only by OpenTelemetry's own variables."""
    tracing = {"OTEL_EXPORTER_OTLP_ENDPOINT": spans.grpc, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    return shared.pair("--enable-prompt-embeds", settings=tracing)


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Creates three adapters: a, b, and another one with the name b."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, model, seed=seed) for seed, name in enumerate("abc", 1)}


@pytest.fixture(scope="session")
def expected(children: Children, model: Path, adapters: dict[str, Path]) -> Expected:
    return bare_answers(children, model, adapters)
