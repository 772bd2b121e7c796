"""Adds a worker extension for tests: compiling is an error, and WATCHED_THREADS gets the thread count."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.convert_frame
import torch._inductor.codecache
import torch._inductor.compile_fx
from vllm.v1.worker.cpu_worker import CPUWorker

from dynamo_vllm.engine.patches.cpu_worker import CpuWorkerExtension

COMPILERS = (
    (torch._dynamo.convert_frame, "_compile"),
    (torch._inductor.compile_fx, "compile_fx"),
    (torch._inductor.codecache.CppCodeCache, "load_async"),
)
"""The entry points of Dynamo, inductor, and the C++ compiler behind both."""


class RefusesToCompile(CpuWorkerExtension):
    """Is mixed into vLLM's worker; its import makes compiling an error."""


def _refused(name: str) -> Any:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} was called while serving")

    return refused


def _watched(execute: Any) -> Any:
    @functools.wraps(execute)
    def execute_model(*args: Any, **kwargs: Any) -> Any:
        found = execute(*args, **kwargs)
        if path := os.environ.get("WATCHED_THREADS"):
            Path(path).write_text(str(torch.get_num_threads()))
        return found

    return execute_model


for _owner, _name in COMPILERS:
    assert hasattr(_owner, _name), f"torch has no {_name} any more: find what replaced it"
    setattr(_owner, _name, _refused(_name))
CPUWorker.execute_model = _watched(CPUWorker.execute_model)
