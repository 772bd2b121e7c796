"""Runs blocking work of an engine in a thread, off the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Not asyncio.to_thread: the end of the event loop, and a signal, would wait for the work's end."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # whoever stops waiting cannot cancel it

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as exc:
            done.set_exception(exc)

    threading.Thread(target=run, name="engine-work", daemon=True).start()
    return asyncio.wrap_future(done)
