"""Imports vLLM once, in a process with one thread, from which other processes are forked.

`python -m dynamo_vllm.engine.process.preload FD ARCHITECTURE…` is the zygote of a `serve`. FD is its end of a
socket pair, on which it reports that it is ready and then receives requests for processes (`forking`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm import forking
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.process import environment as vllm_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MODULE = __name__
_VLLM = (
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.parser.parser_manager",
    "vllm.reasoning",
    "vllm.renderers.hf",
    "vllm.tool_parsers",
    "vllm.usage.usage_lib",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.coordinator",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.metrics.loggers",
    "vllm.v1.structured_output.backend_xgrammar",
    "zmq.utils.garbage",
)
_OURS = ("dynamo_vllm.engine.vllm.assembly",)
_OF_DEVICE = {"cpu": ("vllm.v1.worker.cpu_worker",), "cuda": ("vllm.v1.worker.gpu_worker",)}
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""Is set while importing: numerical libraries start a thread per core when they are loaded."""


def import_vllm(architectures: Iterable[str] = ()) -> None:
    """Imports all of vLLM that a worker and its engine core need, and the classes of these models."""
    machine.refuse_missing_library()
    gc.disable()  # imports create no garbage, and looking for it takes a sixth of the time
    for name in (*_VLLM, *_OF_DEVICE[machine.device()], *_OURS):
        importlib.import_module(name)
    for name in architectures:
        with contextlib.suppress(ImportError):  # the worker fails with vLLM's own message
            _import_model(name)
    gc.enable()


def _import_model(architecture: str) -> None:
    """Registers a model's class in advance.

    Otherwise vLLM 0.30 inspects the class in a subprocess, which imports all of vLLM again.
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    if known is not None:
        ModelRegistry.register_model(architecture, known.load_model_cls())


def architectures_of(model: str) -> list[str]:
    """Returns the architectures in a local model's config.json; none if it cannot be read."""
    try:
        found = json.loads(Path(model, "config.json").read_text()).get("architectures")
    except (OSError, ValueError, AttributeError):
        return []
    return [str(name) for name in found] if isinstance(found, list) else []


def import_and_fork(model: str, environment: Mapping[str, str]) -> forking.Zygote:
    """Imports vLLM in this process and forks a zygote from it. Raises CannotFork."""
    more = import_environment(environment)
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    import_vllm(architectures_of(model))
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    name_process()
    if (why_not := refusal()) is not None:
        raise forking.CannotFork(why_not)
    return forking.make_zygote()


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set while this process imports vLLM for forked processes."""
    return {**vllm_environment.import_environment(environment), **ONE_THREAD}


def refusal() -> str | None:
    """Returns why this process must not fork; None if it may."""
    import torch

    if torch.cuda.is_initialized():
        return "CUDA is initialised"
    if found := forking.other_threads():
        return f"other threads are running: {', '.join(found)}"
    return None


def name_process(title: str | None = None) -> None:
    """Sets the title that `ps` shows.

    setproctitle must be used once before a forked process replaces its environment.
    """
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(title or setproctitle.getproctitle())


def main(argv: Sequence[str]) -> None:
    """Runs the zygote of a `serve`: imports vLLM, reports readiness, then forks on request."""
    connection = socket.socket(fileno=int(argv[0]))
    owner = os.getppid()
    name_process("dynamo-vllm zygote")
    try:
        import_vllm(argv[1:])
        why_not = refusal()
    except Exception as exc:
        traceback.print_exc()
        why_not = f"{type(exc).__name__}: {exc}"
    connection.sendall(json.dumps({"refusal": why_not}).encode() + b"\n")
    if why_not is None:
        forking.serve(connection, owner)


if __name__ == "__main__":
    main(sys.argv[1:])
