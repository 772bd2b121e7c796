"""What every long-running process of ours does at its start and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError
from dynamo_vllm.serving.lifecycle.shutdown import end_signals

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping


def refuse_taken_port(flag: str, host: str, port: int) -> None:
    """Say so now: the Rust servers would only log it and go on without the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise StartError(
                f"{flag} {port} on {host} cannot be used: {exc.strerror}; choose another"
            ) from None


def run_to_exit(life: Coroutine[object, object, int]) -> int:
    """Run a process' life; a signal during the start ends it, later the life itself handles signals."""
    import uvloop

    for number in end_signals():
        if number != signal.SIGINT:
            signal.signal(number, _end_now)
    # A signal of a forked engine core would wake our loop, which would take it for its own.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    try:
        return uvloop.run(life)
    except KeyboardInterrupt:
        return 130


def ask_quietly(life: Coroutine[object, object, int], environment: Mapping[str, str]) -> int:
    """Run a command that calls others through the runtime, without the runtime's words on the terminal.

    Runtime 1.6.1 writes a line for every call to file descriptor 2, and no filter in DYN_LOG stops it. Who
    sets DYN_LOG wants to see what it says.
    """
    if "DYN_LOG" not in environment:
        with contextlib.suppress(OSError):  # there may be none
            ours = os.dup(2)
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            sys.stderr = os.fdopen(ours, "w", buffering=1, errors="backslashreplace")
    signal.signal(signal.SIGTERM, _end_now)
    return asyncio.run(life)


def _end_now(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def exit_process(code: int) -> None:
    """End without waiting for the runtime's or the engine's threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(code)
