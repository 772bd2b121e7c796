"""How a process is asked to end."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.errors import EngineDead

logger = logging.getLogger(__name__)
EXIT_ENGINE_DEAD = 3


def on_dead_engine(ending: asyncio.Future[int]) -> Callable[[EngineDead], None]:
    """To be called with the reason, by whoever finds out; only the first is told."""

    def died(exc: EngineDead) -> None:
        if not ending.done():
            logger.error("the engine is dead: %s", exc)
            ending.set_result(EXIT_ENGINE_DEAD)

    return died


def on_signals(ending: asyncio.Future[int], is_stopped: Callable[[], bool]) -> None:
    """The first SIGTERM or SIGINT asks for an orderly end, the second ends at once."""
    loop = asyncio.get_running_loop()

    def asked(number: int) -> None:
        if not ending.done():
            ending.set_result(0)
        elif is_stopped():  # nothing is cut short any more
            raise SystemExit(ending.result())
        else:
            raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)
