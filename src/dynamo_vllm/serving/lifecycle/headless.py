"""Runs a node with engines for a worker on another node: it has no endpoint and is not in discovery."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.vllm import headless as vllm_headless
from dynamo_vllm.errors import EngineDead
from dynamo_vllm.serving.lifecycle import node_link
from dynamo_vllm.serving.lifecycle.shutdown import EXIT_ENGINE_DEAD, close_engine, on_signals

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.serving.lifecycle.progress import Progress
    from dynamo_vllm.serving.plane.runtime import Runtime

logger = logging.getLogger(__name__)


async def run(settings: EngineSettings, drt: Runtime, progress: Progress, token: str | None) -> int:
    """Run until a signal, or until its engines or the worker are gone; return the exit code."""
    node = settings.node
    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ready() -> None:
        drt.set_health_status(True)
        progress.phase("ready", models=[], engines=node.name)
        logger.info("serving no endpoint; engines of %s", node.name)

    try:
        engine = await vllm_headless.launch(settings, progress.phase)
        try:
            on_signals(ending, lambda: False)
            progress.phase("joining", leader=f"{node.leader}:{node.port}")
            return await first_ending(ending, node_link.follow(node, token, ready), engine.wait())
        finally:
            drt.set_health_status(False)
            await close_engine(engine)
    finally:
        drt.shutdown()


async def first_ending(
    ending: asyncio.Future[int], follow: Coroutine[Any, Any, None], watch: Coroutine[Any, Any, None]
) -> int:
    following, watching = asyncio.create_task(follow), asyncio.create_task(watch)
    try:
        every: list[asyncio.Future[Any]] = [ending, following, watching]
        await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        return exit_code(ending, watching)
    finally:
        following.cancel()
        watching.cancel()


def exit_code(ending: asyncio.Future[int], watching: asyncio.Task[None]) -> int:
    """Return the exit code for what ended first: a signal, a dead engine, a lost worker."""
    if ending.done():
        return ending.result()
    if watching.done() and isinstance(exc := watching.exception(), EngineDead):
        logger.error("the engine is dead: %s", exc)
    else:
        logger.error("lost the connection to the worker of these engines")
    return EXIT_ENGINE_DEAD
