"""Gives failures of the runtime a class of their own: it raises nothing narrower than Exception."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, TypeVar

from dynamo_vllm.config.planes import BUSY_FOLDER
from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

logger = logging.getLogger(__name__)
BUSY_SECONDS = 60.0
AGAIN_SECONDS = 0.1
T = TypeVar("T")


class RuntimeFailed(Exception):
    """The runtime did not do what it was asked for."""


@contextlib.contextmanager
def of_runtime() -> Iterator[None]:
    """Raise what a call of the runtime raises as RuntimeFailed, with its text."""
    try:
        yield
    except StartError:
        raise
    except Exception as exc:
        raise RuntimeFailed(str(exc) or type(exc).__name__) from exc


async def when_not_busy(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask the runtime again while the folder of file discovery is busy; else raise RuntimeFailed.

    Runtime 1.6.1 locks the folder for every read and change, and gives up after about a second. A hundred
    processes that start at once on a few cores keep it busy for longer.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    is_said = False
    while True:
        try:
            with of_runtime():
                return await ask()
        except RuntimeFailed as exc:
            if BUSY_FOLDER not in str(exc) or time.monotonic() > deadline:
                raise
            if not is_said:
                logger.warning("discovery is busy; it is asked again for up to %.0f s", BUSY_SECONDS)
            is_said = True
        await asyncio.sleep(AGAIN_SECONDS)
