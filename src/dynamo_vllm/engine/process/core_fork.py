"""Forks vLLM's engine cores from the worker's zygote, a process that has already imported vLLM.

vLLM 0.30 spawns or forks them. A spawned core imports all of vLLM again, which takes a third to a half of the
start-up time. A core forked from the worker would copy a process in which other threads, such as the
runtime's, may hold locks. The zygote has one thread, and the core that it forks is a child of the worker.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
from multiprocessing import util
from multiprocessing.context import BaseContext, set_spawning_popen
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from dynamo_vllm import forking
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.patches import process_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_vllm.engine.vllm.names import Config


_PROCESSES = "VLLM_WORKER_MULTIPROC_METHOD"
_inherited: list[int] = []
"""In a forked process: the file descriptors that it inherited."""


@contextlib.contextmanager
def forked_cores(zygote: forking.Zygote | None, config: Config) -> Iterator[None]:
    """Has vLLM fork engine cores and their coordinator from the zygote, if there is one; then ends it."""
    if zygote is None:
        yield
        return
    if config.parallel_config.numa_bind:  # vLLM binds a core by starting it through numactl
        zygote.close()
        yield
        return
    try:
        with process_context.using(_Context(zygote)):
            yield
    finally:
        zygote.close()


class _Context(BaseContext):
    """Replaces the `multiprocessing` context that vLLM starts its processes with."""

    _name = "zygote"

    def __init__(self, zygote: forking.Zygote) -> None:
        self._zygote = zygote

    def Process(self, **about: Any) -> _Process:  # the name that multiprocessing uses
        process = _Process(**about)
        process.zygote = self._zygote
        return process


class _Process(BaseProcess):
    """Is a process that the zygote forks on `start`."""

    _start_method = None
    zygote: forking.Zygote | None = None

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "zygote"}

    @staticmethod
    def _Popen(process: _Process) -> _Popen:
        return _Popen(process)


class _Popen(Popen):
    """Controls the forked process as if this process had forked it."""

    method = "zygote"

    def _launch(self, process: _Process) -> None:
        assert process.zygote is not None
        self._fds: list[int] = []
        buffer = io.BytesIO()
        # Makes the pickler pass pipes among the arguments to `duplicate_for_child`.
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(process)
        finally:
            set_spawning_popen(None)
        # vLLM's own default for the shards of a core, which has one thread when it starts them.
        more = {_PROCESSES: "fork"} if machine.device() == "cuda" else {}
        sentinel, kept_by_child = os.pipe()
        task = forking.Task(
            call=f"{__name__}:run",
            args=(buffer.getvalue(),),
            env={**os.environ, **more},
            end_signal=signal.SIGKILL,
        )
        try:
            self.pid = process.zygote.fork(task, [kept_by_child, *self._fds])
        finally:
            os.close(kept_by_child)
        self.sentinel = sentinel
        self.finalizer = util.Finalize(self, os.close, (sentinel,))

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds)

    @staticmethod
    def DupFd(number: int) -> _Fd:
        return _Fd(number)


class _Fd:
    """Stands for a file descriptor that a forked process will inherit."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        return _inherited[self._number]


def run(fds: list[int], payload: bytes) -> int:
    """Runs the pickled process; the zygote calls this in the process that it forked."""
    _inherited[:] = fds
    import torch

    # The number that OpenMP would choose in a new process; the zygote limited its libraries to one thread.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    process: _Process = pickle.loads(payload)
    code: int = process._bootstrap()  # type: ignore[attr-defined]
    return code
