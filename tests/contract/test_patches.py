"""Tests that each patch is needed, changes its targets, and changes nothing when applied again."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import vllm

from dynamo_vllm import forking
from dynamo_vllm.engine.patches.cpu import nixl_cores
from dynamo_vllm.engine.patches.patch import VLLM_VERSIONS, Patch, State, installed, is_within
from dynamo_vllm.engine.patches.table import PATCHES
from dynamo_vllm.engine.process import cpu_threads
from dynamo_vllm.engine.process.environment import NIXL_PAUSE_VARIABLE

CONDITIONS = {NIXL_PAUSE_VARIABLE: "1000", cpu_threads.BIND: "nobind"}
"""Those under which some patches are applied."""


def report(fds: Sequence[int], name: str) -> None:
    """In a forked process, so that patches do not affect each other: write what a patch does."""
    try:
        answer = probe(next(patch for patch in PATCHES if patch.name == name))
    except Exception as exc:
        answer = {"error": f"{type(exc).__name__}: {exc}"}
    os.write(fds[0], json.dumps(answer).encode())


def probe(patch: Patch) -> dict[str, Any]:
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.gettempdir()  # after its library was imported
    is_needed = patch.still_needed()
    before = [stored(target) for target in patch.targets]
    is_applied_here = patch.only_if()
    patch.apply()
    once = [stored(target) for target in patch.targets]
    patch.apply()
    twice = [stored(target) for target in patch.targets]
    compared = zip(patch.targets, before, once, strict=True)
    return {
        "is needed": is_needed,
        "is applied here": is_applied_here,
        "unchanged": [target for target, old, new in compared if old is new],
        "stays": all(old is new for old, new in zip(once, twice, strict=True)),
    }


def stored(target: str) -> Any:
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


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_is_needed_and_applied_once(unpatched: forking.Zygote, patch: Patch) -> None:
    if (state := patch.state()) in (State.NOT_INSTALLED, State.OTHER_DEVICE):
        pytest.skip(str(state))
    version = str(installed(patch.package))
    if state is State.OTHER_VERSION and patch.package == "vllm" and is_within(version, VLLM_VERSIONS):
        pytest.skip(f"looked at: not needed with vLLM {version}")
    assert state is State.APPLIED, f"{patch.package} is another version now: look at {patch.module}"
    reading, writing = os.pipe()
    task = forking.Task("contract.test_patches:report", (patch.name,), {**os.environ, **CONDITIONS})
    pid = unpatched.fork(task, [writing])
    os.close(writing)
    with os.fdopen(reading) as answer:
        outcome = json.loads(answer.read() or '{"error": "the process ended"}')
    os.waitpid(pid, 0)
    assert "error" not in outcome, f"what {patch.module} looks for is not there: {outcome['error']}"
    assert outcome["is needed"], f"upstream has fixed it: remove {patch.module} ({patch.name})"
    assert outcome == {"is needed": True, "is applied here": True, "unchanged": [], "stays": True}


def test_nobody_else_asks_for_the_cores_that_are_hidden_from_nixl() -> None:
    package = Path(vllm.__path__[0])
    users = [p for p in package.rglob("*.py") if "discover_numa_topology()" in p.read_text()]
    assert [str(p.relative_to(package)) for p in users] == [nixl_cores.CONNECTOR]
