"""The real runtime with the fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.models.tiny import make_tiny_model
from harness.stack import Stack, Worker, stack

StartFake = Callable[..., Worker]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as made:
        made.start_frontend()
        yield made


@pytest.fixture
def start_fake(deployment: Stack, model: Path) -> StartFake:
    """Starts a worker with the fake engine: `start_fake(*flags, token_ms=5)`."""

    def start(*flags: str, **spec: Any) -> Worker:
        described = json.dumps({"vocab_size": 1000, **spec})
        names = [] if "--served-model-name" in flags else ["--served-model-name", "tiny"]
        return deployment.start_worker(
            "--model", str(model), *names, "--engine", "fake", "--fake-engine", described, *flags
        )

    return start
