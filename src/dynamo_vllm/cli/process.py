"""Starts and ends the processes of commands: handles signals, exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from dynamo_vllm.serving.lifecycle.shutdown import end_signals

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping


def run_to_exit(life: Coroutine[object, object, int]) -> int:
    """Run a process until it ends. A signal during the start ends it; later `life` handles signals."""
    import uvloop

    for number in end_signals():
        if number != signal.SIGINT:
            signal.signal(number, _end_now)
    # A signal to a forked engine core would wake our event loop, which would handle it as its own.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    try:
        return uvloop.run(life)
    except KeyboardInterrupt:
        return 130


def ask_quietly(life: Coroutine[object, object, int], environment: Mapping[str, str]) -> int:
    """Run a command that calls workers through the runtime, without the runtime's log on the terminal."""
    silence_runtime(environment)
    clean_up_at_termination()
    return asyncio.run(life)


def silence_runtime(environment: Mapping[str, str]) -> None:
    """Keep the runtime's log off the terminal: our own lines go to a copy of the error output.

    Runtime 1.6.1 writes a line for every call to file descriptor 2, and no filter in DYN_LOG stops it. If
    the user sets DYN_LOG, the log is shown.
    """
    if "DYN_LOG" not in environment:
        with contextlib.suppress(OSError):  # the descriptor may be closed
            ours = os.dup(2)
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            sys.stderr = os.fdopen(ours, "w", buffering=1, errors="backslashreplace")


def clean_up_at_termination() -> None:
    """Let SIGTERM end this process as an exception does, so that it ends what it has started."""
    signal.signal(signal.SIGTERM, _end_now)


def _end_now(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def exit_process(code: int) -> None:
    """End without waiting for the runtime's or the engine's threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has closed it
            stream.flush()
    os._exit(code)
