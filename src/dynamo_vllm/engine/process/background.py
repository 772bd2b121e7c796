"""Runs blocking work of an engine in a thread, off the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Runs the work in a daemon thread and returns its future.

    With asyncio.to_thread the end of the event loop, and so a signal, would wait for the end of the work.
    """
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # a cancelled caller does not cancel the work

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as exc:
            done.set_exception(exc)

    threading.Thread(target=run, name="engine-work", daemon=True).start()
    return asyncio.wrap_future(done)
