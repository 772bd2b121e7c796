"""Defines what an operator can do with a worker, independent of transport and implementation."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_vllm.engine.base import EngineOp, Tiers
    from dynamo_vllm.job import EngineFacts
    from dynamo_vllm.lora.registry import Registry

Reply = dict[str, Any]


class WorkerState(enum.Enum):
    """The state of a worker; READY means that requests are answered."""

    STARTING = "starting"
    READY = "ready"
    UNWELL = "unwell"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    PAUSING = "pausing"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"


AT_REST = frozenset({WorkerState.FALLING_ASLEEP, WorkerState.ASLEEP, WorkerState.PAUSING, WorkerState.PAUSED})
"""Not ready because an operator said so."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """The result of a change of state."""

    seconds: float = 0.0
    freed_bytes: int | None = None
    already: bool = False
    """The worker was in that state before; nothing was done."""


class Life(Protocol):
    """The states of a worker, as far as an operator may change them."""

    state: WorkerState

    async def sleep(self, level: int, drain_seconds: float) -> StateChange: ...

    async def wake(self) -> StateChange: ...

    async def pause(self, keep: bool, drain_seconds: float) -> StateChange: ...

    async def resume(self) -> StateChange: ...


class ControlledEngine(Protocol):
    """The part of an engine that verbs use."""

    async def control(self, op: EngineOp) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The parts of a worker that verbs act on."""

    life: Life
    engine: ControlledEngine
    facts: EngineFacts
    adapters: Registry | None
    """None if LoRA is off."""
    tiers: Tiers | None
    """None if the engine has no tiers of KV caches."""
    drain_seconds: float
    status: Callable[[], Reply]
    """Return the answer of `status`."""


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a verb; unknown fields are refused, so that typos are noticed."""


class Nothing(Body, frozen=True):
    """A verb without arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One verb: its arguments, the states in which it is allowed, and its function."""

    name: str
    help: str
    run: Callable[[Any, Controls], Awaitable[Reply]]
    body: type[Body] = Nothing
    states: frozenset[WorkerState] = frozenset(WorkerState)
    has_endpoint: bool = False
    """Whether the worker's component also serves it as a separate endpoint."""
    rest: tuple[str, str] | None = None
    """Method and path besides POST /engine/NAME; a part in braces is a field of the body."""
