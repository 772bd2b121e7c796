"""Starts a vLLM-Omni pipeline from a worker's settings."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.base import EngineParts
from dynamo_vllm.engine.omni import arguments as omni_arguments
from dynamo_vllm.engine.omni import facts as omni_facts
from dynamo_vllm.engine.omni import pipelines as omni_pipelines
from dynamo_vllm.engine.omni.engine import OmniEngine
from dynamo_vllm.engine.patches import plugin, table
from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.vllm.compat import versions
from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_omni.entrypoints.async_omni import AsyncOmni

    from dynamo_vllm.engine.base import OnLoad, OnPhase
    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.job import EngineFacts

logger = logging.getLogger(__name__)
PROGRESS_SECONDS = 10.0
"""The time between log lines about a long start."""
FAILED_SECONDS = 10.0
"""The limit for shutting down after a failed start; the stages end with this process anyway."""


async def launch(settings: EngineSettings, on_load: OnLoad, on_phase: OnPhase) -> OmniEngine:
    """Starts the engine; if a later step fails, it ends the stages that have started."""
    on_phase("importing")
    omni_arguments.refuse_missing()
    versions.refuse_for_omni()
    omni_arguments.set_environment(settings, omni_pipelines.choose(settings.model))
    make = await _with_progress("importing vLLM-Omni", _imported)
    plugin.register_omni()
    table.apply(Where.OMNI_WORKER)
    pipeline = omni_pipelines.resolve(settings.model)
    omni_pipelines.register(pipeline)
    given = omni_arguments.arguments(settings, pipeline, settings.scratch_folder)
    on_phase("loading")
    try:
        omni = await _with_progress("loading the stages", lambda: make(**given))
    except (RuntimeError, ValueError, TypeError, KeyError, OSError) as exc:
        raise StartError(f"vLLM-Omni did not start: {_reason(exc)}") from exc
    try:
        omni.log_stats = False  # metrics stay; otherwise vLLM-Omni logs a table per request
        on_phase("cache")
        facts = await _facts(omni, settings.model)
        return OmniEngine(omni, facts, await _parts(omni, facts, settings.model), on_load)
    except BaseException:
        await asyncio.wait({in_thread(omni.shutdown)}, timeout=FAILED_SECONDS)
        raise


async def _with_progress(what: str, work: Callable[[], Any]) -> Any:
    """Runs a blocking step in a thread, and logs how long it has been running."""
    began = time.monotonic()
    task = in_thread(work)
    while not task.done():
        await asyncio.wait({task}, timeout=PROGRESS_SECONDS)
        if not task.done():
            logger.info("%s for %.0f s", what, time.monotonic() - began)
    return task.result()


def _imported() -> Any:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    return AsyncOmni


async def _facts(omni: AsyncOmni, model: str) -> EngineFacts:
    call = await asyncio.to_thread(omni_arguments.call_arguments, model)
    return await omni_facts.read(omni, omni_arguments.media_limits(model, omni.output_modalities, call))


async def _parts(omni: AsyncOmni, facts: EngineFacts, model: str) -> EngineParts:
    from dynamo_vllm.engine.omni import parts as omni_parts  # imports vLLM

    if facts.pipeline is None:
        return EngineParts(renderer=omni_parts.OmniRenderer(omni))
    return EngineParts(count_tokens=await asyncio.to_thread(omni_parts.token_counter, model))


def _reason(exc: BaseException) -> str:
    """Returns the innermost cause: vLLM-Omni wraps a stage's exception several times."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(lines[:4]) or type(exc).__name__
