"""A process that has imported vLLM and forks a child per task: an engine then starts in seconds.

Run as `python -m harness.zygote SOCKET`. A task is one JSON line {"call": "module:function", "args": […],
"env": {…}, "log": PATH}, with "namespace" it runs on that host (`harness.hosts`); the child runs it, and the
answers are {"pid": n} and, when it ends, {"code": n}.
It forks before any thread exists, which is why it serves one connection per task and does nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

NAMESPACES = Path("/var/run/netns")
_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000
_RECURSIVE_SLAVE, _DETACH = 0x4000 | 0x80000, 2


def import_everything() -> None:
    """All of vLLM that an engine needs, so that a fork has it already.

    None of ours and not the runtime: they read settings and choose ports where they are imported.
    """
    for name in (
        "torch",
        "vllm.engine.arg_utils",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.model_executor.models.qwen3",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.structured_output",
        "vllm.v1.worker.cpu_worker",
    ):
        importlib.import_module(name)
    know_vision_models()


def know_vision_models() -> None:
    """vLLM looks at a model's class in a process of its own, which imports all of vLLM, unless it is here."""
    from vllm import ModelRegistry

    for module, model in (
        ("llava", "LlavaForConditionalGeneration"),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    ):
        imported = importlib.import_module(f"vllm.model_executor.models.{module}")
        ModelRegistry.register_model(model, getattr(imported, model))


def main(path: str) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    import_everything()
    gc.collect()
    gc.freeze()  # vLLM collects when an engine has started: 0.4 s over all that is here already
    Path(path + ".ready").touch()
    children: dict[int, socket.socket] = {}
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([server, wake_read, sys.stdin], [], [])
        if sys.stdin in ready:  # the test run is over
            for pid in children:
                os.killpg(pid, signal.SIGKILL)
            return
        if wake_read in ready:
            os.read(wake_read, 4096)
        if server in ready:
            connection, _ = server.accept()
            task = json.loads(connection.makefile().readline())
            pid = os.fork()
            if pid == 0:
                server.close()
                run(task)
            children[pid] = connection
            connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        reap(children)


def reap(children: dict[int, socket.socket]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            connection = children.pop(pid)
            with contextlib.suppress(OSError):  # nobody waits for it
                connection.sendall(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
            connection.close()


def run(task: dict[str, Any]) -> None:
    """In the child: a session of its own, its output in its log."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(task["env"])
        if "namespace" in task:
            enter(task["namespace"])
        module, _, name = task["call"].partition(":")
        code = int(getattr(importlib.import_module(module), name)(*task["args"]) or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def enter(namespace: str) -> None:
    """Moves this process, which has one thread, to a host, and /sys with it, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: object) -> None:
        if getattr(libc, name)(*args) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    with (NAMESPACES / namespace).open("rb") as entry:
        call("setns", entry.fileno(), _NEW_NETWORK)
    call("unshare", _NEW_MOUNTS)
    call("mount", b"", b"/", b"none", ctypes.c_ulong(_RECURSIVE_SLAVE), None)
    with contextlib.suppress(OSError):  # where there is none
        call("umount2", b"/sys", _DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None)


if __name__ == "__main__":
    main(sys.argv[1])
