"""Loads an adapter into this worker: fetches and checks it, gives it to the engine, lists it as a model."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import addresses
from dynamo_vllm.engine.base import AddAdapter, RemoveAdapter
from dynamo_vllm.errors import AdminError, NotListed, StartError
from dynamo_vllm.lora.files import AdapterFiles
from dynamo_vllm.lora.registry import Registry
from dynamo_vllm.lora.sources.base import SourceLimits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.engine.base import OnPhase
    from dynamo_vllm.job import Adapter, EngineFacts
    from dynamo_vllm.serving.lifecycle.operations import Controlled
    from dynamo_vllm.serving.plane.registration import Registration

logger = logging.getLogger(__name__)
SETTLE_SECONDS = 1.0
"""How long a frontend may take to notice that an adapter is gone."""


class AdapterSteps:
    """Implements the steps of `lora.registry` with the real parts."""

    def __init__(self, files: AdapterFiles, engine: Controlled, registration: Registration) -> None:
        self._engine = engine
        self._registration = registration
        self.fetch = files.fetch
        self.verify = files.verify

    async def add(self, adapter: Adapter) -> None:
        await self._engine.control(AddAdapter(adapter))

    async def remove(self, adapter: Adapter) -> None:
        await self._engine.control(RemoveAdapter(adapter))

    async def publish(self, adapter: Adapter) -> None:
        with _discovery_errors(adapter, "discovery did not add it"):
            await self._registration.publish_adapter(adapter.name)

    async def withdraw(self, adapter: Adapter) -> None:
        with _discovery_errors(adapter, "discovery did not remove it"):
            await self._registration.withdraw_adapter(adapter.name)


@contextlib.contextmanager
def _discovery_errors(adapter: Adapter, problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # the runtime raises nothing narrower
        logger.warning("adapter %s: %s: %s", adapter.name, problem, str(exc) or type(exc).__name__)
        raise NotListed(f"{problem}; try again, and see the worker's log") from exc


async def make_registry(
    options: WorkerOptions, cache: Path, facts: EngineFacts, engine: Controlled, registration: Registration
) -> Registry | None:
    """Return the adapters of this worker; None if LoRA is off."""
    limits = facts.adapters
    if limits is None:
        return None
    files = AdapterFiles(cache, SourceLimits(max_bytes=int(options.lora_max_gb * 1e9)), limits.max_rank)
    await files.start(Path(str(options.model)), registration.names[0])
    steps = AdapterSteps(files, engine, registration)
    room = None if options.discovery_folder is None else addresses.adapter_room(options.address)
    return Registry(steps, limits.capacity, registration.names, SETTLE_SECONDS, room=room)


async def load_first(registry: Registry | None, modules: Sequence[str], on_phase: OnPhase) -> None:
    """Load the adapters of --lora-modules at the start."""
    if registry is None:
        return
    for word in modules:
        name, _, uri = word.partition("=")
        on_phase(f"adapter {name}")
        try:
            await registry.load(name, uri)
        except AdminError as exc:
            raise StartError(f"--lora-modules {word}: {exc}") from exc


class NoAdapters:
    """The adapters of a worker with LoRA off."""

    async def close(self) -> None: ...

    async def withdraw_all(self) -> None: ...

    async def publish_all(self) -> None: ...

    async def add_all(self) -> None: ...

    def changing(self) -> str | None:
        return None


NONE = NoAdapters()
