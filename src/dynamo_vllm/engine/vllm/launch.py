"""Starts a vLLM engine from a worker's settings."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.engine.vllm.preparation import prepare

if TYPE_CHECKING:
    from dynamo_vllm.engine.base import OnLoad, OnPhase
    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.engine.vllm.engine import VllmEngine


async def launch(settings: EngineSettings, on_load: OnLoad, on_phase: OnPhase) -> VllmEngine:
    """Starts the engine; if a step fails or a signal cancels it, everything is closed again."""
    prepared = prepare(settings, Where.WORKER, on_phase)
    from dynamo_vllm.engine.vllm import assembly  # imports vLLM, which `prepare` has prepared

    async with AsyncExitStack() as ends:
        return await assembly.assemble(prepared, settings, on_load, on_phase, ends)
