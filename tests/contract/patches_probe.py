"""Probes and applies each patch in a process with unpatched vLLM, and prints the findings as JSON."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import tempfile
from typing import Any

from dynamo_vllm.engine.patches.patch import Patch, State
from dynamo_vllm.engine.patches.table import PATCHES
from dynamo_vllm.engine.process import cpu_threads, preload
from dynamo_vllm.engine.process.environment import NIXL_PAUSE_VARIABLE

ASKED = {NIXL_PAUSE_VARIABLE: "1000", cpu_threads.BIND: "nobind"}
"""The conditions under which some patches are applied."""


def look(patch: Patch) -> dict[str, Any]:
    """Runs in a forked process."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.gettempdir()  # after its library was imported
    needed = patch.still_needed()
    before = [found(target) for target in patch.targets]
    wanted = patch.only_if()
    patch.apply()
    once = [found(target) for target in patch.targets]
    patch.apply()
    twice = [found(target) for target in patch.targets]
    alike = [old is new for old, new in zip(before, once, strict=True)]
    alike_again = [old is new for old, new in zip(once, twice, strict=True)]
    return {
        "needed": needed,
        "wanted": wanted,
        "unchanged": [target for target, is_alike in zip(patch.targets, alike, strict=True) if is_alike],
        "stays": all(alike_again),
    }


def found(target: str) -> Any:
    """Returns the object with a dotted name as its owner stores it; None if it does not exist."""
    names = target.split(".")
    inner: list[str] = []
    while True:
        try:
            owner: Any = importlib.import_module(".".join(names))
            break
        except ImportError:
            inner.insert(0, names.pop())
    for name in inner[:-1]:
        owner = getattr(owner, name)
    return inspect.getattr_static(owner, inner[-1], None)


def apart(patch: Patch) -> dict[str, Any]:
    """Forks, so that the patches do not affect each other and vLLM is imported once."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            told = look(patch)
        except BaseException as exc:
            told = {"error": f"{type(exc).__name__}: {exc}"}
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    seen: dict[str, Any] = json.loads(text or '{"error": "the process ended"}')
    return seen


if __name__ == "__main__":
    os.environ.update({**preload.ONE_THREAD, **ASKED})
    preload.import_vllm()
    seen = {patch.name: apart(patch) for patch in PATCHES if patch.state() is State.APPLIED}
    sys.stdout.write(f"{json.dumps(seen)}\n")
