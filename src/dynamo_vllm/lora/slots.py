"""Holds one adapter of a worker: its state, its leases, and its description for status replies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_vllm.job import Adapter
    from dynamo_vllm.lora.base import AdapterFacts, Fetched


class AdapterState(StrEnum):
    FETCHING = "fetching"
    VERIFYING = "verifying"
    ADDING = "adding"
    PUBLISHING = "publishing"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """The state of one adapter at one moment."""

    name: str
    uri: str
    state: AdapterState
    id: int | None
    leases: int
    is_published: bool
    done_bytes: int
    total_bytes: int | None
    error: str | None
    facts: AdapterFacts | None
    already_loaded: bool = False
    """In the reply to a load: whether it was loaded before."""


class Lease:
    """A lease: the adapter stays in the engine until `release`."""

    __slots__ = ("_slot", "adapter")

    def __init__(self, slot: Slot, adapter: Adapter) -> None:
        self._slot: Slot | None = slot
        self.adapter = adapter
        slot.leases += 1

    def release(self) -> None:
        """End the lease; further calls do nothing."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        slot.leases -= 1
        if slot.leases == 0 and slot.idle is not None:
            slot.idle.set()


class Slot:
    """One load of one name and its result."""

    __slots__ = (
        "adapter",
        "error",
        "facts",
        "fetched",
        "idle",
        "in_engine",
        "is_listed",
        "is_open",
        "is_published",
        "leases",
        "name",
        "progress",
        "state",
        "uri",
    )

    def __init__(self, name: str, uri: str) -> None:
        self.name, self.uri = name, uri
        self.state = AdapterState.FETCHING
        self.progress: tuple[int, int | None] = (0, None)
        self.fetched: Fetched | None = None
        self.facts: AdapterFacts | None = None
        self.adapter: Adapter | None = None
        self.error: str | None = None
        self.in_engine = False  # from before it is added until it has been removed, whatever fails between
        self.is_listed = False  # likewise in discovery
        self.is_published = False
        self.is_open = False  # whether new leases are granted
        self.leases = 0
        self.idle: asyncio.Event | None = None  # only while somebody waits for the last lease

    @property
    def takes_room(self) -> bool:
        return self.state is not AdapterState.FAILED or self.in_engine

    @property
    def known_adapter(self) -> Adapter:
        assert self.adapter is not None
        return self.adapter

    def note_progress(self, done: int, total: int | None) -> None:
        self.progress = (done, total)

    async def wait_until_idle(self) -> None:
        self.idle = asyncio.Event()
        while self.leases:
            self.idle.clear()
            await self.idle.wait()
        self.idle = None

    def entry(self, *, already_loaded: bool = False) -> AdapterEntry:
        done, total = self.progress
        return AdapterEntry(
            name=self.name,
            uri=self.uri,
            state=self.state,
            id=self.adapter.id if self.adapter else None,
            leases=self.leases,
            is_published=self.is_published,
            done_bytes=done,
            total_bytes=total,
            error=self.error,
            facts=self.facts,
            already_loaded=already_loaded,
        )
