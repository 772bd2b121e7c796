"""Replaces vLLM's guide checker in tests of its processes: a guide's regex says what compiling it does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

LOAD = "harness.guides:load"
LATE = "harness.guides:load_late"
FAILS = "harness.guides:fail"
LATE_SECONDS = 1.0


def load(payload: bytes) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`payload` is a folder for what the checkers leave there."""
    folder = payload.decode()

    def check(fields: dict[str, Any]) -> dict[str, Any]:
        what, _, more = fields["regex"].partition(" ")
        with open(f"{folder}/{what}", "a") as seen:
            seen.write(f"{os.getpid()}\n")
        act = ACTS.get(what)
        return act(more) if act is not None else {"backend": "a", "changes": {}}

    return check


def load_late(payload: bytes) -> Callable[[dict[str, Any]], dict[str, Any]]:
    time.sleep(LATE_SECONDS)  # as a large tokenizer takes
    return load(payload)


def fail(payload: bytes) -> Callable[[dict[str, Any]], dict[str, Any]]:
    raise ValueError(f"no tokenizer in {payload.decode()}")


def burn(seconds: str) -> dict[str, Any]:
    """Processor time, and not the clock's."""
    end = time.process_time() + float(seconds)
    while time.process_time() < end:
        sum(range(1000))
    return {"backend": "burnt", "changes": {}}


def take(megabytes: str) -> dict[str, Any]:
    kept = bytearray(int(megabytes) << 20)
    return {"backend": f"took {len(kept) >> 20}", "changes": {}}


def wait(path: str) -> dict[str, Any]:
    """Until there is a file."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return {"backend": "waited", "changes": {}}


def die(number: str) -> dict[str, Any]:
    os.kill(os.getpid(), int(number))
    signal.pause()
    return {}


ACTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "burn": burn,
    "take": take,
    "wait": wait,
    "die": die,
    "refuse": lambda why: {"refused": why},
    "become": lambda text: {"backend": "a", "changes": {"regex": None, "grammar": text, "other": "x"}},
    "panic": lambda _: dict[str, dict[str, Any]]()["nothing"],
}
