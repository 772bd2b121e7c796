"""Runs data-parallel ranks or shards of a vLLM engine for a worker on another node.

It does what `vllm serve --headless` does, without taking over signals and the main thread.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.engine.process import core_fork
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.vllm.preparation import prepare
from dynamo_vllm.errors import EngineDead, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

    from dynamo_vllm.engine.base import OnPhase
    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.engine.vllm.names import Config

END_SECONDS = 5.0


async def launch(settings: EngineSettings, on_phase: OnPhase) -> HeadlessVllm:
    """Starts the processes of this node.

    When it returns, shards have connected to their leader; ranks connect later on their own.
    """
    prepared = prepare(settings, Where.NODE, on_phase)
    config, args = prepared.config, prepared.resolved.args
    try:
        if settings.node.runs_ranks:
            with core_fork.forked_cores(settings.zygote, config):
                return _ranks(config, log_stats=not args.disable_log_stats)
        return _shards(config)
    except Exception as exc:  # vLLM raises a bare Exception for a process that failed
        raise StartError(f"vLLM did not start: {exc}") from exc


class HeadlessVllm:
    """Owns the processes of this node, which get their work from the leader."""

    def __init__(self, processes: Sequence[BaseProcess], shut_down: Callable[[], None]) -> None:
        self._processes = processes
        self._shut_down = shut_down
        self._is_closed = False

    async def wait(self) -> None:
        """Waits until one of the processes ends, then raises EngineDead."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseProcess] = loop.create_future()
        watched = list(self._processes)

        def note(process: BaseProcess) -> None:
            if not ended.done():
                ended.set_result(process)

        for process in watched:
            loop.add_reader(process.sentinel, note, process)
        try:
            process = await ended
        finally:
            for other in watched:
                loop.remove_reader(other.sentinel)
        process.join()
        raise EngineDead(f"{process.name} ended with code {process.exitcode}")

    async def close(self) -> None:
        """Ends the processes. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await in_thread(self._end)

    def _end(self) -> None:
        # vLLM 0.30: if the queue is closed first, a shard waits on it for another node until killed (9 s).
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(END_SECONDS)
        self._shut_down()


def _ranks(config: Config, log_stats: bool) -> HeadlessVllm:
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    parallel = config.parallel_config
    manager = CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        log_stats=log_stats,
    )
    return HeadlessVllm(manager.processes, manager.shutdown)


def _shards(config: Config) -> HeadlessVllm:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(config, monitor_workers=False)
    return HeadlessVllm([worker.proc for worker in executor.workers], executor.shutdown)
