"""The test's side of the zygote: start it once, fork workers and references from it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_vllm.engine.vllm_start import plugins
from harness.hosts import Host
from harness.stack import TESTS, Stack, Worker, environment, free_system_port
from harness.waiting import until

# Where vLLM-Omni is installed it would enter the engines of vLLM that tests compare ours with.
_PLUGINS = plugins(with_omni=False)
# Fork the engine core too, and let it run its one worker itself.
FORKED = {
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    **({"VLLM_PLUGINS": ",".join(_PLUGINS)} if _PLUGINS is not None else {}),
}
NOT_WARMED = {"DYN_VLLM_WARM_UP": "false"}
"""The warm-up is a second of every start, and has tests of its own."""
WARMED = {"DYN_VLLM_WARM_UP": "true"}
CACHE_BLOCKS = 1024
"""128 MiB of the tiny models. vLLM zeroes the cache: that of a GiB is most of an engine's start."""
ENGINE_FLAGS = (
    "--max-model-len",
    "2048",
    "--enforce-eager",
    "--dtype",
    "float32",
    "--distributed-executor-backend",
    "uni",
    "--num-gpu-blocks-override",
    str(CACHE_BLOCKS),
)


@dataclass
class Forked:
    """A child of the zygote."""

    pid: int
    connection: socket.socket
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.connection.setblocking(False)
            try:
                self._read()
            except BlockingIOError:
                return None
        return self.code

    def wait(self, timeout: float) -> int:
        if self.code is None:
            self.connection.settimeout(timeout)
            self._read()
        assert self.code is not None
        return self.code

    def _read(self) -> None:
        line = self.connection.recv(4096)
        self.code = json.loads(line)["code"] if line else -1
        self.connection.close()


@dataclass
class Zygote:
    path: Path

    def fork(
        self, call: str, args: Sequence[Any], env: Mapping[str, str], log: Path, host: Host | None = None
    ) -> Forked:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30)
        connection.connect(str(self.path))
        task = {"call": call, "args": args, "env": dict(env), "log": str(log)}
        if host is not None:
            task["namespace"] = host.namespace
        connection.sendall(json.dumps(task).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            line += connection.recv(1)
        return Forked(json.loads(line)["pid"], connection)

    def start_worker(
        self,
        stack: Stack,
        model: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        host: Host | None = None,
    ) -> Worker:
        """A real worker with a real engine, in seconds."""
        worker = self.start_node(stack, model, *args, env=env, host=host)
        stack.workers.append(worker)
        return worker

    def start_node(
        self,
        stack: Stack,
        model: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        host: Host | None = None,
    ) -> Worker:
        """The same for a process that is to be no worker of its own in discovery."""
        port = free_system_port()
        log = stack.folder / f"worker{len(stack.processes)}.log"
        argv = ["--model", str(model), "--served-model-name", "tiny", "--system-port", str(port)]
        process = self.fork(
            "dynamo_vllm.cli.main:run_command",
            ["dynamo_vllm.cli.worker", [*argv, *ENGINE_FLAGS, *args]],
            stack.environment(host, **FORKED, **{**NOT_WARMED, **(env or {})}),
            log,
            host,
        )
        stack.processes.append(process)
        return Worker(process, port, log, *([host.address] if host else []))


@contextmanager
def zygote(folder: Path) -> Iterator[Zygote]:
    path = folder / "zygote"
    modules = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "zygote.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.zygote", str(path)],
            cwd=TESTS,
            env=environment(folder, **FORKED, PYTHONPATH=os.pathsep.join(modules)),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            until("warm vLLM", Path(f"{path}.ready").exists, 120, every=0.2)
            yield Zygote(path)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)
