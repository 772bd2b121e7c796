"""Holds the adapters of this worker and their states. Pure: injected steps do the work.

    fetching → verifying → adding → publishing → loaded → unloading → gone
        └──────────┴──────────┴─────────┴→ failed (visible with its reason until the next load of the name)

One task at a time per name (`keyed_tasks`). A call for what the latest task of the name is about to do joins
it: fifty loads of one name fetch once, and all unloads that wait for the same end succeed.

A load of a loaded name fetches again and compares the content, because a path or a branch may have changed;
sources know cheaper ways to find out than a second download.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_vllm.config import addresses
from dynamo_vllm.errors import AdapterConflict, AdapterUnknown, NoRoom, UnknownModel, WrongState
from dynamo_vllm.job import Adapter
from dynamo_vllm.lora import names
from dynamo_vllm.lora.keyed_tasks import Acts
from dynamo_vllm.lora.slots import AdapterEntry, AdapterState, Lease, Slot

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from dynamo_vllm.lora.base import AdapterFacts, Fetched, OnProgress

logger = logging.getLogger(__name__)

MAX_FAILED = 64
"""Failed loads that stay visible; the oldest is dropped first."""


class Steps(Protocol):
    """The steps of loading an adapter; each raises if it failed."""

    async def fetch(self, name: str, uri: str, on_progress: OnProgress) -> Fetched: ...
    async def verify(self, fetched: Fetched) -> AdapterFacts:
        """Check the files; raises AdapterRefused."""

    async def add(self, adapter: Adapter) -> None: ...
    async def remove(self, adapter: Adapter) -> None:
        """Remove the adapter from the engine, which may not have it."""

    async def publish(self, adapter: Adapter) -> None: ...
    async def withdraw(self, adapter: Adapter) -> None:
        """Withdraw the adapter from discovery, which may not have it."""


class Registry:
    def __init__(
        self,
        steps: Steps,
        capacity: int,
        reserved: Collection[str] = (),
        settle_seconds: float = 0.0,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        room: int | None = None,
    ) -> None:
        """`reserved` are the base model's names, `room` the bytes that discovery has for an adapter's key.

        A withdrawn adapter is served for another `settle_seconds`: a frontend may have chosen this worker
        just before it noticed.
        """
        self.capacity = capacity
        self.failures = 0
        """Loads that failed, and adapters that were lost later."""
        self._steps = steps
        self._reserved = frozenset(reserved)
        self._room = room
        self._settle_seconds = settle_seconds
        self._sleep = sleep
        self._slots: dict[str, Slot] = {}
        self._acts = Acts()
        self._numbers: dict[tuple[str, str], int] = {}
        """The engine's ids, by name and content."""
        self._is_hidden = False

    # -- called by admin verbs ---------------------------------------------------------------------

    async def load(self, name: str, uri: str) -> AdapterEntry:
        """Load an adapter. Raises BadCommand, AdapterConflict, NoRoom, WrongState, or an error of a step."""
        names.check(name, self._reserved, self._room)
        return await self._acts.join(name, ("load", uri), lambda: self._load(name, uri))

    async def unload(self, name: str) -> None:
        """Return when the engine no longer has it; forgets a failed one. Raises AdapterUnknown."""
        await self._acts.join(name, "unload", lambda: self._unload(name))

    def entries(self) -> list[AdapterEntry]:
        return [self._slots[name].entry() for name in sorted(self._slots)]

    def changing(self) -> str | None:
        """Return the name of an adapter that is being loaded or unloaded."""
        return self._acts.changing()

    # -- called by requests ------------------------------------------------------------------------

    def lease(self, name: str) -> Lease:
        """Grant a lease, from publishing on until an unload has settled."""
        slot = self._slots.get(name)
        if slot is None or not slot.is_open:
            raise UnknownModel(f"there is no adapter {name!r} on this worker", parameter="model")
        return Lease(slot, slot.known_adapter)

    # -- called by the worker's lifecycle ----------------------------------------------------------
    # Each returns name → reason for those that failed; the others are done.

    async def withdraw_all(self) -> dict[str, str]:
        """Hide the adapters until `publish_all`; loads that are not published yet fail."""
        self._is_hidden = True
        return await self._for_each(self._withdraw)

    async def publish_all(self) -> dict[str, str]:
        self._is_hidden = False
        return await self._for_each(self._publish)

    async def add_all(self) -> dict[str, str]:
        """Load all into the engine again, which has lost their weights. Those it refuses have failed.

        Call it while no requests come: it waits for running ones, and refuses new ones meanwhile.
        """
        return await self._for_each(self._add_again)

    async def close(self) -> None:
        """Stop what is running; loads are rolled back, and the others are withdrawn."""
        self._is_hidden = True
        await self._acts.cancel()
        await self.withdraw_all()

    # -- loading -----------------------------------------------------------------------------------

    async def _load(self, name: str, uri: str) -> AdapterEntry:
        async with self._acts.lock(name):
            old = self._slots.get(name)
            if old is not None and old.state is AdapterState.LOADED:
                return await self._load_again(old, uri)
            if old is not None:
                await self._clear(old)
            slot = self._reserve(name, uri)
            try:
                await self._bring_up(slot)
            except BaseException as exc:
                await self._roll_back(slot, exc)
                raise
            logger.info("adapter %s: loaded from %s, id %d", name, uri, slot.known_adapter.id)
            return slot.entry()

    def _reserve(self, name: str, uri: str) -> Slot:
        self._check_awake()
        self._check_card(name)
        taken = sum(slot.takes_room for slot in self._slots.values() if slot.name != name)
        if taken >= self.capacity:
            raise NoRoom(
                f"{taken} of {self.capacity} adapters are loaded or loading; "
                "unload one, or start the worker with a larger --max-loras"
            )
        self._slots.pop(name, None)  # so that the newest is the last to be forgotten
        slot = self._slots[name] = Slot(name, uri)
        return slot

    async def _bring_up(self, slot: Slot) -> None:
        slot.fetched = await self._steps.fetch(slot.name, slot.uri, slot.note_progress)
        slot.state = AdapterState.VERIFYING
        slot.facts = await self._steps.verify(slot.fetched)
        self._check_awake()
        slot.adapter = self._identify(slot.name, slot.fetched)
        slot.state, slot.in_engine = AdapterState.ADDING, True
        await self._steps.add(slot.adapter)
        self._check_awake()
        # A frontend may send requests before `publish` returns.
        slot.state, slot.is_open = AdapterState.PUBLISHING, True
        await self._publish(slot)
        slot.state = AdapterState.LOADED

    def _identify(self, name: str, fetched: Fetched) -> Adapter:
        """vLLM serves the first content of an id, and keys KV caches by the name. A cache on disk may be from
        an earlier run, or be read by another worker: only the content itself makes the name safe. A # cannot
        be part of a name that somebody loads."""
        number = self._numbers.setdefault((name, fetched.digest), len(self._numbers) + 1)
        return Adapter(name, number, str(fetched.path), f"{name}#{fetched.digest[:32]}", fetched.digest)

    async def _load_again(self, slot: Slot, uri: str) -> AdapterEntry:
        assert slot.fetched is not None
        fetched = await self._steps.fetch(slot.name, uri, lambda _done, _total: None)
        if fetched.digest != slot.fetched.digest:
            raise AdapterConflict(
                f"{slot.name!r} is loaded with other content, from {slot.uri}; unload it first"
            )
        if not self._is_hidden:
            await self._publish(slot)
        return slot.entry(already_loaded=True)

    async def _roll_back(self, slot: Slot, reason: BaseException) -> None:
        """Undo what was done; an adapter that the engine does not release keeps its slot."""
        slot.error = _text(reason)
        self.failures += 1
        logger.warning("adapter %s from %s has failed: %s", slot.name, slot.uri, slot.error)
        await self._undo(slot, self._withdraw)
        slot.is_open = False
        await slot.wait_until_idle()
        await self._undo(slot, self._remove)
        self._mark_failed(slot)

    async def _undo(self, slot: Slot, step: Callable[[Slot], Awaitable[None]]) -> None:
        error = await _attempt(step, slot)
        if error is not None:
            logger.error("adapter %s: %s", slot.name, error)

    def _mark_failed(self, slot: Slot) -> None:
        slot.state, slot.is_open = AdapterState.FAILED, False
        gone = [s.name for s in self._slots.values() if not s.takes_room and not s.is_listed]
        for name in gone[:-MAX_FAILED]:
            del self._slots[name]

    # -- unloading ---------------------------------------------------------------------------------

    async def _unload(self, name: str) -> None:
        async with self._acts.lock(name):
            slot = self._slots.get(name)
            if slot is None:
                raise AdapterUnknown(f"there is no adapter {name!r}; loaded: {self._loaded_names()}")
            if slot.state is AdapterState.LOADED:
                await self._take_away(slot)
            await self._clear(slot)
            del self._slots[name]
            logger.info("adapter %s: unloaded", name)

    async def _take_away(self, slot: Slot) -> None:
        """Withdraw it and wait until no request uses it."""
        slot.state = AdapterState.UNLOADING
        try:
            await self._withdraw(slot)
            await self._sleep(self._settle_seconds)
        except BaseException:
            slot.state = AdapterState.LOADED
            raise
        slot.is_open = False
        await slot.wait_until_idle()

    async def _clear(self, slot: Slot) -> None:
        """Remove it, or mark it as failed: an unused adapter, or what an earlier roll-back left."""
        try:
            await self._withdraw(slot)
            await self._remove(slot)
        except BaseException as exc:
            slot.error = f"could not be removed, unload it again: {_text(exc)}"
            self._mark_failed(slot)
            raise

    def _loaded_names(self) -> str:
        return ", ".join(s.name for s in self._slots.values() if s.state is AdapterState.LOADED) or "none"

    # -- sleep and wake ----------------------------------------------------------------------------

    async def _for_each(self, step: Callable[[Slot], Awaitable[None]]) -> dict[str, str]:
        """All at once: if discovery is down, each waits for its deadline."""
        # The others may take minutes: a download, a slow engine, requests that hold a lease.
        slots = [
            slot
            for slot in self._slots.values()
            if slot.state in (AdapterState.PUBLISHING, AdapterState.LOADED)
        ]
        errors = await asyncio.gather(*(self._for_one(step, slot) for slot in slots))
        return {slot.name: error for slot, error in zip(slots, errors, strict=True) if error is not None}

    async def _for_one(self, step: Callable[[Slot], Awaitable[None]], slot: Slot) -> str | None:
        async with self._acts.lock(slot.name):
            if self._slots.get(slot.name) is slot and slot.state is AdapterState.LOADED:
                return await _attempt(step, slot)
        return None

    async def _add_again(self, slot: Slot) -> None:
        assert slot.fetched is not None
        slot.is_open = False
        await slot.wait_until_idle()
        try:
            # Files used in place may have changed since; an id must not get other content.
            await self._steps.verify(slot.fetched)
            await self._remove(slot)
            slot.in_engine = True
            await self._steps.add(slot.known_adapter)
        except BaseException as exc:
            await self._roll_back(slot, exc)
            raise
        slot.is_open = True

    # -- one step, with its mark -------------------------------------------------------------------

    async def _publish(self, slot: Slot) -> None:
        if not slot.is_published:
            slot.is_listed = True
            await self._steps.publish(slot.known_adapter)
            slot.is_published = True

    async def _withdraw(self, slot: Slot) -> None:
        if slot.is_listed:
            await self._steps.withdraw(slot.known_adapter)
            slot.is_listed = slot.is_published = False

    async def _remove(self, slot: Slot) -> None:
        if slot.in_engine:
            await self._steps.remove(slot.known_adapter)
            slot.in_engine = False

    # -- what is refused ---------------------------------------------------------------------------

    def _check_awake(self) -> None:
        if self._is_hidden:
            raise WrongState("this worker is out of service; load adapters when it is back")

    def _check_card(self, name: str) -> None:
        """Two adapters cannot share a card: the second would not be listed, and would remove the first."""
        card = addresses.slug(name)
        for slot in self._slots.values():
            if (
                (slot.takes_room or slot.is_listed)
                and slot.name != name
                and addresses.slug(slot.name) == card
            ):
                raise AdapterConflict(
                    f"{name!r} and {slot.name!r}, which is loaded, are the same to discovery ({card}); "
                    "give it another name"
                )


async def _attempt(step: Callable[[Slot], Awaitable[None]], slot: Slot) -> str | None:
    """Return why it failed, if it did. The steps come from outside and may raise anything."""
    try:
        await step(slot)
    except Exception as exc:
        return _text(exc)
    return None


def _text(exc: BaseException) -> str:
    if isinstance(exc, asyncio.CancelledError):
        return "the worker is ending"
    return str(exc) or type(exc).__name__
