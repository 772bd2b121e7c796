"""Handles the signals that stop a process, and closes its engine with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING, Any, Protocol

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.errors import EngineDead

logger = logging.getLogger(__name__)
EXIT_ENGINE_DEAD = 3
CLOSE_SECONDS = 10.0
"""vLLM kills its own processes if they do not end within five seconds."""
HURRY_SECONDS = 1.0
"""The deadline after a second signal."""


class Closing(Protocol):
    async def close(self) -> None: ...


def on_dead_engine(ending: asyncio.Future[int]) -> Callable[[EngineDead], None]:
    """Callback for the reason of the end; only the first call counts."""

    def died(exc: EngineDead) -> None:
        if not ending.done():
            logger.error("the engine is dead: %s", exc)
            ending.set_result(EXIT_ENGINE_DEAD)

    return died


def end_signals() -> tuple[int, ...]:
    """Return the signals that stop a process; not SIGHUP if it was ignored, as under nohup."""
    always = (signal.SIGTERM, signal.SIGINT)
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


def is_repeated_hangup(number: int, was_asked: bool) -> bool:
    """A closing terminal sends several SIGHUPs, from the shell and the kernel; they count as one."""
    return was_asked and number == signal.SIGHUP


def on_signals(ending: asyncio.Future[int], is_stopped: Callable[[], bool]) -> None:
    """The first SIGTERM, SIGINT or SIGHUP starts an orderly shutdown, the second ends the process at once."""
    loop = asyncio.get_running_loop()

    def asked(number: int) -> None:
        if is_repeated_hangup(number, ending.done()):
            return
        if not ending.done():
            ending.set_result(0)
        elif is_stopped():  # nothing is cut short any more
            raise SystemExit(ending.result())
        else:
            loop.set_exception_handler(_ignore_moves)
            raise SystemExit(128 + number)

    for number in end_signals():
        loop.add_signal_handler(number, asked, number)


def _ignore_moves(loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
    """Say nothing of requests that end so when the loop does: their frontends move them."""
    from dynamo.llm.exceptions import StreamIncomplete

    if not isinstance(told.get("exception"), StreamIncomplete):
        loop.default_exception_handler(told)


async def close_engine(engine: Closing) -> None:
    """Let the engine end before the deadline, then kill what is left."""
    task = asyncio.current_task()
    seconds = HURRY_SECONDS if task is not None and task.cancelling() else CLOSE_SECONDS
    closing = asyncio.ensure_future(engine.close())
    try:
        await asyncio.wait({closing}, timeout=seconds)
        if closing.done():
            closing.result()
        else:
            logger.warning("the engine did not end within %.0f s: killed", seconds)
    finally:
        if not closing.done() or closing.cancelled():  # the latter by a second signal
            kill_children()


def kill_children() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
