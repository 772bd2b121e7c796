"""Runs engines of vLLM for a worker on another node: its data-parallel ranks, or its shards of one.

What `vllm serve --headless` does, without taking the process' signals and its main thread.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches import table
from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.engine.process import core_fork
from dynamo_vllm.engine.process import environment as vllm_environment
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.vllm import arguments as vllm_arguments
from dynamo_vllm.errors import EngineDead, StartError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.process import BaseProcess

    from dynamo_vllm.engine.base import OnPhase
    from dynamo_vllm.engine.settings import EngineSettings

logger = logging.getLogger(__name__)
END_SECONDS = 5.0


class HeadlessVllm:
    """Processes that take their work from the leader."""

    def __init__(self, settings: EngineSettings, on_phase: OnPhase) -> None:
        self._settings = settings
        self._on_phase = on_phase
        self._owner: Any = None

    async def start(self) -> None:
        """Ranks are started and go on by themselves; shards have met their leader when it returns."""
        self._on_phase("importing")
        vllm_environment.set_environment(self._settings)
        table.apply(Where.NODE)
        resolved = vllm_arguments.resolve(self._settings)
        for fired in resolved.fired:
            logger.info("default %s", fired)
        config = vllm_arguments.create_config(resolved.args, self._settings)
        self._settings.on_resolved(vllm_arguments.described(resolved.args, config))
        self._on_phase(vllm_arguments.loading_phase(config))
        try:
            if self._settings.node.runs_ranks:
                with core_fork.forked_cores(self._settings.zygote, config):
                    self._owner = _ranks(config, log_stats=not resolved.args.disable_log_stats)
            else:
                self._owner = _shards(config)
        except Exception as exc:  # vLLM raises a bare Exception for a process that failed
            raise StartError(f"vLLM did not start: {exc}") from exc

    @property
    def _processes(self) -> Sequence[BaseProcess]:
        if self._settings.node.runs_ranks:
            found: Sequence[BaseProcess] = self._owner.processes
            return found
        return [worker.proc for worker in self._owner.workers]

    async def wait(self) -> None:
        """Raises EngineDead when one of the processes has ended."""
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
        """Idempotent, also after a failed start."""
        if self._owner is not None:
            await in_thread(self._end)

    def _end(self) -> None:
        # vLLM 0.30: a shard whose queue is closed first waits on it for another node until it is killed, 9 s.
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(END_SECONDS)
        owner, self._owner = self._owner, None
        owner.shutdown()


def _ranks(config: Any, log_stats: bool) -> Any:
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    parallel = config.parallel_config
    return CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        log_stats=log_stats,
    )


def _shards(config: Any) -> Any:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(config, monitor_workers=False)
