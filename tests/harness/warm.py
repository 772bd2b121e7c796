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

from dynamo_vllm import forking
from dynamo_vllm.engine.process import preload
from dynamo_vllm.engine.process.environment import plugins
from harness import forks
from harness.forks import RUN_COMMAND, Forked
from harness.hosts import Host
from harness.processes import free_port
from harness.stack import TESTS, Stack, Worker, environment

# Where vLLM-Omni is installed it would enter the engines of vLLM that tests compare ours with.
_PLUGINS = plugins(with_omni=False)
FORKED = {
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    **({"VLLM_PLUGINS": ",".join(_PLUGINS)} if _PLUGINS is not None else {}),
}
"""For bare vLLM: fork the engine core too, and let it run its one worker itself."""
FORKED_SHARDS = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""For workers of ours, whose engine cores are forked anyway: what a core makes itself."""
ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "BertModel",
    "BertForSequenceClassification",
)
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
class Zygote:
    """A process that has imported vLLM: an engine then starts in seconds."""

    inner: forking.Zygote

    def fork(
        self, call: str, args: Sequence[Any], env: Mapping[str, str], log: Path, host: Host | None = None
    ) -> Forked:
        return forks.fork(self.inner, call, args, env, log, host)

    def start_worker(
        self,
        stack: Stack,
        model: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        host: Host | None = None,
        call: str = RUN_COMMAND,
    ) -> Worker:
        """A real worker with a real engine, in seconds."""
        worker = self.start_node(stack, model, *args, env=env, host=host, call=call)
        stack.workers.append(worker)
        return worker

    def start_node(
        self,
        stack: Stack,
        model: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        host: Host | None = None,
        call: str = RUN_COMMAND,
    ) -> Worker:
        """The same for a process that is to be no worker of its own in discovery."""
        port = free_port()
        log = stack.folder / f"worker{len(stack.processes)}.log"
        argv = ["--model", str(model), "--served-model-name", "tiny", "--system-port", str(port)]
        process = self.fork(
            call,
            ["dynamo_vllm.cli.start.worker", [*argv, *ENGINE_FLAGS, *args]],
            stack.environment(host, **FORKED_SHARDS, **{**NOT_WARMED, **(env or {})}),
            log,
            host,
        )
        stack.processes.append(process)
        return Worker(process, port, log, *([host.address] if host else []))


@contextmanager
def zygote(folder: Path) -> Iterator[Zygote]:
    modules = [str(TESTS), str(TESTS.parent / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours, theirs = socket.socketpair()
    env = environment(folder, PYTHONPATH=os.pathsep.join(modules))
    with (folder / "zygote.log").open("wb") as log, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", preload.MODULE, str(theirs.fileno()), *ARCHITECTURES],
            cwd=TESTS,
            env={**env, **preload.import_environment(env)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        ours.settimeout(300)
        said = json.loads(ours.recv(4096))
        assert said == {"refusal": None}, said
        yield Zygote(forking.Zygote(ours, process.pid))
    finally:
        ours.close()
        process.wait(60)
