"""What an operator can do with the processes of a running `serve`: list, restart and drain them, and scale
groups.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from dynamo_vllm.supervise.control import messages
from dynamo_vllm.supervise.control.messages import (
    ControlError,
    Drain,
    Processes,
    Report,
    Request,
    Restart,
    Scale,
)
from dynamo_vllm.supervise.keeper import OrderFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from dynamo_vllm.supervise.keeper import Keeper
    from dynamo_vllm.supervise.kept_processes import KeptProcesses
    from dynamo_vllm.supervise.planning.process import Group, Plan, Process

_KINDS = {"envoy": "gateway"}
"""Kinds of processes that are not called so."""
_DOING = {"start": "started", "restart": "restarted", "drain": "drained", "stop": "stopped"}


class Operations:
    """Carries out requests; one at a time for each process and for each group."""

    def __init__(
        self,
        plan: Plan,
        kept: KeptProcesses,
        is_serving: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._pool = plan.pool
        self._kept = kept
        self._is_serving = is_serving
        self._say = say
        self._scaling: set[str] = set()

    async def perform(self, request: Request, report: Report) -> dict[str, Any]:
        """Return the result; ControlError if it is refused or fails."""
        if isinstance(request, Processes):
            return self.processes()
        if isinstance(request, Restart):
            return await self.restart(request, report)
        if isinstance(request, Drain):
            return await self.drain(request, report)
        return await self.scale(request, report)

    # --- processes --------------------------------------------------------------------------------------

    def processes(self) -> dict[str, Any]:
        return {
            "at": round(time.time(), 3),
            "is_serving": self._is_serving(),
            "processes": [describe(keeper) for keeper in self._kept],
            "groups": [
                {
                    "name": group.name,
                    "model": group.model,
                    "role": group.role,
                    "workers": [keeper.name for keeper in self._members(group.name)],
                }
                for group in self._groups
            ],
        }

    @property
    def _groups(self) -> list[Group]:
        return [] if self._pool is None else list(self._pool.groups.values())

    def _members(self, group: str) -> list[Keeper]:
        """Return the workers of a group, the oldest first."""
        return [keeper for keeper in self._kept.workers if keeper.process.group == group]

    # --- restart ----------------------------------------------------------------------------------------

    async def restart(self, request: Restart, report: Report) -> dict[str, Any]:
        keeper = self._keeper(request.name)
        self._refuse_busy([keeper])
        self._refuse_long_drain([keeper], request.drain_seconds)
        began = time.monotonic()
        self._say(
            f"{keeper.name} is {'started again' if keeper.is_drained else 'restarted'}, as somebody asked"
        )
        try:
            await self._kept.restart(keeper, request.drain_seconds, _told(report))
        except OrderFailed as exc:
            raise ControlError(messages.FAILED, str(exc)) from None
        return {"process": describe(keeper), "seconds": round(time.monotonic() - began, 3)}

    def _keeper(self, name: str) -> Keeper:
        keeper = self._kept.get(name)
        if keeper is None:
            names = ", ".join(keeper.name for keeper in self._kept)
            raise ControlError(
                messages.UNKNOWN, f"{name!r} is no process of this serve; choose one of {names}"
            )
        return keeper

    def _refuse_busy(self, keepers: Iterable[Keeper]) -> None:
        for keeper in keepers:
            if keeper.order is not None:
                doing = _DOING[keeper.order.action]
                raise ControlError(messages.BUSY, f"{keeper.name} is being {doing}; wait until that is done")

    def _refuse_long_drain(self, keepers: Iterable[Keeper], drain_seconds: float | None) -> None:
        for keeper in keepers:
            own = keeper.process.drain_seconds
            if drain_seconds is not None and drain_seconds > own:
                raise ControlError(
                    messages.REFUSED,
                    f"{keeper.name} ends {own:g} s after it was asked to; give at most that, or start serve "
                    f"with --drain-seconds {drain_seconds:g}",
                )

    # --- drain ------------------------------------------------------------------------------------------

    async def drain(self, request: Drain, report: Report) -> dict[str, Any]:
        """Stop a worker until somebody restarts it; one that is stopped already stays so."""
        keeper, began = self._keeper(request.name), time.monotonic()
        group = self._group_to_drain(keeper)
        self._refuse_busy([keeper])
        self._refuse_long_drain([keeper], request.drain_seconds)
        if not keeper.is_drained:
            self._say(f"{keeper.name} is drained, as somebody asked; 'restart {keeper.name}' starts it again")
            try:
                await self._kept.drain(keeper, request.drain_seconds, _told(report))
            except OrderFailed as exc:
                raise ControlError(messages.FAILED, str(exc)) from None
        return {
            "process": describe(keeper),
            "model": group.model,
            "role": group.role,
            "was_last": not self._in_service(group),
            "seconds": round(time.monotonic() - began, 3),
        }

    def _group_to_drain(self, keeper: Keeper) -> Group:
        """Return the worker's group; ControlError for what cannot be drained."""
        if not keeper.process.is_worker:
            names = ", ".join(keeper.name for keeper in self._kept.workers)
            raise ControlError(
                messages.REFUSED,
                f"{keeper.name} is no worker, and only workers can be drained: choose one of {names}, or use "
                f"'restart {keeper.name}'",
            )
        if not self._is_serving():
            raise ControlError(messages.BUSY, "serve is still starting; wait for its ready line")
        group = self._group(keeper.process.group)
        if group.is_headless:
            raise ControlError(
                messages.REFUSED,
                f"{keeper.name} runs engines for a worker on another node; drain that worker, where it runs",
            )
        return group

    def _in_service(self, like: Group) -> bool:
        """Return whether a worker of this model and role is there that nobody drained."""
        names = [group.name for group in self._groups if (group.model, group.role) == (like.model, like.role)]
        return any(
            not keeper.is_drained and (keeper.order is None or keeper.order.action in ("start", "restart"))
            for name in names
            for keeper in self._members(name)
        )

    # --- scale ------------------------------------------------------------------------------------------

    async def scale(self, request: Scale, report: Report) -> dict[str, Any]:
        group = self._group(request.group)
        if not self._is_serving():
            raise ControlError(messages.BUSY, "serve is still starting; wait for its ready line")
        if group.name in self._scaling:
            raise ControlError(messages.BUSY, f"{group.name} is being scaled; wait until that is done")
        members, began = self._members(group.name), time.monotonic()
        self._scaling.add(group.name)
        try:
            if request.workers > len(members):
                await self._grow(group, request.workers - len(members), report)
            elif request.workers < len(members):
                leaving = _leaving(members, len(members) - request.workers)
                if request.workers == 0:
                    self._refuse_none(group)
                await self._shrink(leaving, request.drain_seconds, report)
        finally:
            self._scaling.discard(group.name)
        names = [keeper.name for keeper in self._members(group.name)]
        before = [keeper.name for keeper in members]
        return {
            "group": group.name,
            "workers": names,
            "started": [name for name in names if name not in before],
            "stopped": [name for name in before if name not in names],
            "drained": [keeper.name for keeper in self._members(group.name) if keeper.is_drained],
            "seconds": round(time.monotonic() - began, 3),
        }

    def _group(self, name: str) -> Group:
        for group in self._groups:
            if group.name == name:
                return group
        names = ", ".join(group.name for group in self._groups)
        raise ControlError(
            messages.UNKNOWN, f"{name!r} is no group of workers of this serve; choose one of {names}"
        )

    def _refuse_none(self, group: Group) -> None:
        """A model needs a worker of each role that it has."""
        others = [
            other.name
            for other in self._groups
            if other.name != group.name and (other.model, other.role) == (group.model, group.role)
        ]
        running = [
            keeper
            for name in others
            if name not in self._scaling
            for keeper in self._members(name)
            if not keeper.is_drained
        ]
        if not running:
            raise ControlError(
                messages.REFUSED,
                f"{group.name} has the only {group.role} workers of {group.model}; keep at least 1, or stop "
                "serve",
            )

    async def _grow(self, group: Group, count: int, report: Report) -> None:
        assert self._pool is not None
        running = [keeper.process for keeper in self._kept.workers]
        added = self._pool.more(group.name, running, count)
        self._say(f"{_listed(added)} started, as somebody asked for more of {group.name}")
        failures = await _all(self._kept.add(process, _told(report)) for process in added)
        if failures:
            left = len(self._members(group.name))
            raise ControlError(messages.FAILED, f"{failures[0]}\n  {group.name} has {left} workers now")

    async def _shrink(self, leaving: list[Keeper], drain_seconds: float | None, report: Report) -> None:
        self._refuse_busy(leaving)
        self._refuse_long_drain(leaving, drain_seconds)
        self._say(f"{_listed(keeper.process for keeper in leaving)} stopped, as somebody asked for fewer")
        failures = await _all(self._kept.remove(keeper, drain_seconds, _told(report)) for keeper in leaving)
        if failures:
            raise ControlError(messages.FAILED, failures[0])


def describe(keeper: Keeper) -> dict[str, Any]:
    """Return what is known of a process, for other programs."""
    process, last = keeper.process, keeper.last
    return {
        "name": process.name,
        "kind": "worker" if process.is_worker else _KINDS.get(process.name, process.name),
        "role": process.role,
        "group": process.group or None,
        "pid": None if keeper.child is None else keeper.child.pid,
        "state": keeper.state,
        "phase": keeper.phase,
        "since": round(keeper.since, 3),
        "restarts": max(0, keeper.starts - 1),
        "last_exit": None
        if last is None
        else {"code": last.code, "reason": last.reason, "at": round(keeper.last_at or 0.0, 3)},
        "drain_seconds": process.drain_seconds,
        "essential": process.is_essential,
        "log": keeper.log.name,
    }


def _leaving(members: list[Keeper], count: int) -> list[Keeper]:
    """Return those that leave a group first: drained ones, then the newest."""
    drained = [keeper for keeper in members if keeper.is_drained]
    others = [keeper for keeper in members if not keeper.is_drained]
    return [*drained[::-1], *others[::-1]][:count]


def _told(report: Report) -> Callable[[str, str], None]:
    return lambda name, phase: report({"process": name, "phase": phase})


def _listed(processes: Iterable[Process]) -> str:
    names = [process.name for process in processes]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


async def _all(work: Iterable[Coroutine[object, object, None]]) -> list[str]:
    """Carry out all of it at once; return why some failed."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, OrderFailed):
            raise outcome
    return [str(outcome) for outcome in outcomes if outcome is not None]
