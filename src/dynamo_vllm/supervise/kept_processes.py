"""The processes of a running `serve`: those of its plan, and those that were added or removed since."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dynamo_vllm.supervise.keeper import Keeper, Order, OrderFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dynamo_vllm.supervise.keeper import Action, Surroundings
    from dynamo_vllm.supervise.planning.process import Plan, Process
    from dynamo_vllm.supervise.process.child import Child


class KeptProcesses:
    """Has one keeper for each process, oldest first."""

    def __init__(self, plan: Plan, around: Surroundings) -> None:
        self._pool = plan.pool
        self._around = around
        self._keepers: dict[str, Keeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        """None before the start and after the end."""
        for process in plan.processes:
            self._keepers[process.name] = Keeper(process, around)

    def __iter__(self) -> Iterator[Keeper]:
        return iter(list(self._keepers.values()))

    def get(self, name: str) -> Keeper | None:
        return self._keepers.get(name)

    @property
    def workers(self) -> list[Keeper]:
        return [keeper for keeper in self if keeper.process.is_worker]

    @property
    def children(self) -> list[Child]:
        return [keeper.child for keeper in self if keeper.child is not None]

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start every process of the plan."""
        self._group = tasks
        for keeper in self:
            self._keep(keeper)

    def cancel(self) -> None:
        """Watch no process any more; those that run stay as they are."""
        self._group = None
        for task in self._tasks.values():
            task.cancel()

    def _keep(self, keeper: Keeper) -> None:
        assert self._group is not None
        self._tasks[keeper.name] = self._group.create_task(keeper.keep())

    def _order(
        self,
        action: Action,
        drain_seconds: float | None,
        report: Callable[[str, str], None],
    ) -> Order:
        if self._group is None:
            raise OrderFailed("serve is stopping")
        done = asyncio.get_running_loop().create_future()
        return Order(action, drain_seconds, report, done, has_ended=action == "start")

    async def add(self, process: Process, report: Callable[[str, str], None]) -> None:
        """Start a further process and wait until it is ready; OrderFailed if it does not become so."""
        order = self._order("start", None, report)
        keeper = self._keepers[process.name] = Keeper(process, self._around, order)
        self._keep(keeper)
        try:
            await asyncio.shield(order.done)
        except BaseException:
            await self._forget(keeper)
            raise

    async def restart(
        self, keeper: Keeper, drain_seconds: float | None, report: Callable[[str, str], None]
    ) -> None:
        """Stop a process and wait until it is ready again; OrderFailed if it does not become so."""
        order = self._order("restart", drain_seconds, report)
        keeper.give(order)
        await asyncio.shield(order.done)

    async def drain(
        self, keeper: Keeper, drain_seconds: float | None, report: Callable[[str, str], None]
    ) -> None:
        """Stop a process, which stays stopped until it is restarted."""
        order = self._order("drain", drain_seconds, report)
        keeper.give(order)
        await asyncio.shield(order.done)

    async def remove(
        self, keeper: Keeper, drain_seconds: float | None, report: Callable[[str, str], None]
    ) -> None:
        """Stop a process for good."""
        order = self._order("stop", drain_seconds, report)
        keeper.give(order)
        await asyncio.shield(order.done)
        await self._forget(keeper)

    async def _forget(self, keeper: Keeper) -> None:
        """Drop a process that its keeper has left, with what it had; not one that serve itself stops."""
        await asyncio.wait([self._tasks[keeper.name]])
        if keeper.child is not None:
            return
        del self._keepers[keeper.name], self._tasks[keeper.name]
        self._around.targets.removed(keeper.process)
        self._around.screen.remove(keeper.name)
        if self._pool is not None:
            self._pool.release(keeper.process)
