"""Starts the fake engine after the delay in its spec."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dynamo_vllm.engine.fake.cached_blocks import BlockAnnouncer
from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.errors import EngineDead

if TYPE_CHECKING:
    from dynamo_vllm.engine.base import OnLoad, OnPhase
    from dynamo_vllm.engine.fake.spec import FakeSpec


async def launch(spec: FakeSpec, on_load: OnLoad, on_phase: OnPhase) -> FakeEngine:
    """Starts an engine; raises EngineDead if the spec says that the start fails."""
    on_phase("loading")
    await asyncio.sleep(spec.start_ms / 1000)
    if spec.refuse_start:
        raise EngineDead("the fake engine is set not to start")
    if not spec.cached:
        return FakeEngine(spec, on_load)
    announcer = BlockAnnouncer(spec.cached, spec.block_size)
    return FakeEngine(spec, on_load, await announcer.start(), announcer.close)
