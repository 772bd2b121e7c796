"""Runs one engine in a process of its own, forked from a zygote that has imported vLLM."""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_vllm.engine.process.environment import import_environment
from harness.stack import environment
from harness.waiting import NotInTime
from harness.warm import FORKED, Zygote

LIMIT_SECONDS = {"cpu": 150.0, "cuda": 120.0}
"""For the start of an engine and all its answers."""
_FORKING = threading.Lock()
"""The zygote answers one call at a time."""


@dataclass
class Failed(Exception):
    """An engine did not start, or did not answer."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def run(warm: Zygote, call: str, given: Mapping[str, Any], folder: Path, limit: float) -> Any:
    """Calls `module:function` with `given` in a forked process and returns its result. Raises Failed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "given.json").write_text(json.dumps(given))
    env = environment(folder, **FORKED, **_of_user())
    env = import_environment(env) | env
    with _FORKING:
        child = warm.fork(
            "tiers_proof.children:enter",
            [call, str(folder / "given.json"), str(folder / "found.json")],
            env,
            folder / "log",
        )
    try:
        code = child.wait(limit)
    except NotInTime as exc:
        os.killpg(child.pid, signal.SIGKILL)  # it has a session of its own
        child.wait(10)
        raise Failed(f"no answer within {limit:.0f} s") from exc
    found = folder / "found.json"
    if not found.is_file():
        raise Failed(f"exit code {code}: {_last_line(folder / 'log')}")
    told = json.loads(found.read_text())
    if "error" in told:
        raise Failed(told["error"])
    return told["result"]


def _of_user() -> dict[str, str]:
    """Returns vLLM's variables that this process has; the sampler of FlashInfer would be compiled first."""
    given = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    ours = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    return {**ours, **{n: v for n, v in given.items() if n not in FORKED}}


def enter(call: str, given_file: str, found_file: str) -> int:
    """Is the first call in the forked process."""
    import importlib

    import torch

    torch.compiler.set_stance("force_eager")  # with enforce_eager vLLM still compiles small functions
    module, _, name = call.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(json.loads(Path(given_file).read_text()))
        told = {"result": result}
    except BaseException as exc:
        traceback.print_exc()
        told = {"error": f"{type(exc).__name__}: {exc}"}
    Path(found_file + ".new").write_text(json.dumps(told))
    os.replace(found_file + ".new", found_file)
    return 0


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "no output"
