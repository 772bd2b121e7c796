"""The real runtime with the fake engine."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.media.base import MediaLimits
from dynamo_vllm.media.fetch.addresses import Reach
from dynamo_vllm.media.loader import Loader, make_loader
from dynamo_vllm.models import demo
from dynamo_vllm.models.tiny import make_tiny_model
from harness.bad_server import BadServer, bad_server
from harness.stack import Stack, Worker, stack

StartFake = Callable[..., Worker]
MakeLoader = Callable[..., Loader]
LOOPBACK = Reach(networks=(ipaddress.ip_network("127.0.0.0/8"),))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as made:
        made.start_frontend()
        yield made


def fake(model: Path, **spec: Any) -> tuple[str, ...]:
    """Words of a worker that serves this model as tiny, with the fake engine."""
    described = json.dumps({"vocab_size": 1000, **spec})
    named = ("--model", str(model), "--served-model-name", "tiny")
    return (*named, "--engine", "fake", "--fake-engine", described)


@pytest.fixture
def start_fake(deployment: Stack, model: Path) -> StartFake:
    """Starts a worker with the fake engine: `start_fake(*flags, token_ms=5)`."""
    return lambda *flags, **spec: deployment.start_worker(*fake(model, **spec), *flags)


@contextlib.contextmanager
def another_frontend(made: Stack, *flags: str, name: str = "frontend", **env: str) -> Iterator[Stack]:
    """A frontend beside the workers of a deployment, which leaves as it should at the end."""
    other = Stack(made.folder, made.env, workers=made.workers)
    try:
        process = other.start_frontend(*flags, env=env, name=name)
        yield other.wait_ready()
        os.kill(process.pid, signal.SIGTERM)
        process.wait(60)
    finally:
        other.stop()


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A worker with the demo's model for chats, demo-chat, and a frontend."""
    with stack(tmp_path_factory.mktemp("stack")) as made:
        made.start_frontend()
        words = fake(demo.folder("chat"), vocab_size=100_000, token_ms=2)
        made.start_worker(*words, "--served-model-name", "demo-chat")
        yield made.wait_ready()


@pytest.fixture
async def server() -> AsyncIterator[BadServer]:
    async with bad_server() as made:
        yield made


@pytest.fixture
async def make() -> AsyncIterator[MakeLoader]:
    """Makes loaders of media that may ask loopback, where `server` is."""
    async with contextlib.AsyncExitStack() as ends:

        def loader(limits: MediaLimits, reach: Reach = LOOPBACK, **more: Any) -> Loader:
            made = make_loader(limits, reach=reach, **more)
            ends.push_async_callback(made.aclose)
            return made

        yield loader
