"""Checks guides before they reach the engine: each must compile within limits of CPU time and memory.

A guide is a structured-output constraint: a JSON schema, a regex, a grammar. Each is compiled in a process
that can be killed (`checker_processes`), because the engine's own compiler cannot be interrupted. Every guide
first enters the quick lane, small ones before large ones. A guide that takes too long there starts again in
the slow lane with the full limit, so that others do not wait for it. Results are cached.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.structured_output.lane import Lane, overloaded_if_unable
from dynamo_vllm.errors import InvalidRequest, Overloaded
from dynamo_vllm.job import GUIDE_KINDS, Guide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.engine.structured_output.checker_processes import Source

QUICK_SECONDS = 0.25
"""The CPU time in the quick lane. With a vocabulary of 150,000 tokens a usual schema takes 0.03 to 0.1 s."""
SLOW_NICENESS = 10
"""Is added to the niceness of the quick lane."""
WAIT_SECONDS = 30.0
WAIT_SHARE = 5.0
"""The wall-clock time per second of CPU time that a guide may take, on a machine with other work."""
KEPT_GUIDES = 4096
KEPT_BYTES = 32 << 20
_SIMPLER = "use fewer properties, alternatives or repetitions"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits what compiling one guide may use."""

    seconds: float = 2.0
    """The CPU time."""
    memory_bytes: int = 512 << 20

    @property
    def wait_seconds(self) -> float:
        return WAIT_SECONDS + WAIT_SHARE * self.seconds


@dataclass(frozen=True, slots=True)
class Verdict:
    """Is the cached result of checking one guide."""

    refusal: str | None = None
    backend: str | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The fields that the engine's validation changed: choices become a grammar, for example."""

    @property
    def size(self) -> int:
        return 200 + len(self.refusal or "") + sum(len(v) for v in self.changes.values() if v is not None)


class GuideChecker:
    """Checks the guides of one worker, and caches the results."""

    def __init__(self, source: Source, limits: Limits) -> None:
        self._source = source
        self._limits = limits
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._known_bytes = 0
        self._running: dict[bytes, asyncio.Future[None]] = {}
        self._loading: asyncio.Future[None] | None = None
        quick = min(QUICK_SECONDS, limits.seconds)
        self._quick = Lane("quick", source, quick, limits.memory_bytes)
        self._slow = Lane("slow", source, limits.seconds, limits.memory_bytes, SLOW_NICENESS)

    def load(self) -> asyncio.Future[None]:
        """Starts to load the process that checkers are forked from, unless that is under way."""
        if self._loading is None or self._loading.done():
            self._loading = in_thread(self._source.load)
            self._loading.add_done_callback(_retrieve_exception)
        return self._loading

    async def checked(self, guide: Guide) -> Guide:
        """Returns the guide as the engine should get it.

        Raises InvalidRequest for a guide that is refused, and Overloaded if it waits too long. A cancelled
        call also ends the compilation.
        """
        fields = {f.name: v for f in dataclasses.fields(guide) if (v := getattr(guide, f.name)) is not None}
        text = json.dumps(fields)
        key = hashlib.sha256(text.encode()).digest()
        if key not in self._known and not self._source.is_loaded:
            with overloaded_if_unable():
                await asyncio.shield(self.load())
        try:
            async with asyncio.timeout(self._limits.wait_seconds) as wait:
                verdict = await self._found(key, text)
        except TimeoutError:
            if not wait.expired():
                raise
            seconds = self._limits.wait_seconds
            raise Overloaded(f"{guide.parameter}: not checked within {seconds:g} s; try again") from None
        if verdict.refusal is not None:
            raise InvalidRequest(verdict.refusal, parameter=guide.parameter)
        return dataclasses.replace(guide, **verdict.changes, backend=verdict.backend)

    async def _found(self, key: bytes, text: str) -> Verdict:
        """Returns the result for a guide, which is checked once for all requests that have it.

        If the request that started the check is cancelled, the next one starts it again.
        """
        while (verdict := self._recall(key)) is None:
            if (other := self._running.get(key)) is not None:
                await asyncio.wait([other])
                continue
            mine = self._running[key] = asyncio.get_running_loop().create_future()
            try:
                verdict = await self._check(text)
                self._remember(key, verdict)
            finally:
                del self._running[key]
                mine.set_result(None)
        return verdict

    async def _check(self, text: str) -> Verdict:
        answer = await self._quick.check(text)
        if answer.get("over") == "time" and self._slow.seconds > self._quick.seconds:
            answer = await self._slow.check(text)
        match answer:
            case {"over": "time"}:
                why = f"takes more than {self._limits.seconds:g} s to compile; {_SIMPLER} (--guide-seconds)"
            case {"over": _}:
                megabytes = self._limits.memory_bytes >> 20
                why = f"takes more than {megabytes} MB to compile; {_SIMPLER} (--guide-memory-mb)"
            case {"refused": str(why)}:
                pass
            case {"backend": str(backend), "changes": dict(changes)}:
                known = {kind: value for kind, value in changes.items() if kind in GUIDE_KINDS}
                return Verdict(backend=backend, changes=known)
            case _:
                why = f"its compiler failed; {_SIMPLER}"
        return Verdict(refusal=why)

    def _recall(self, key: bytes) -> Verdict | None:
        if (found := self._known.get(key)) is not None:
            self._known.move_to_end(key)
        return found

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        self._known[key] = verdict
        self._known_bytes += verdict.size
        while len(self._known) > KEPT_GUIDES or (self._known_bytes > KEPT_BYTES and len(self._known) > 1):
            _, oldest = self._known.popitem(last=False)
            self._known_bytes -= oldest.size

    def close(self) -> None:
        """Ends all processes; requests that still wait get an error."""
        for lane in (self._quick, self._slow):
            lane.close()
        in_thread(self._source.close)


def _retrieve_exception(loading: asyncio.Future[None]) -> None:
    """Keeps asyncio from logging an exception that was never retrieved; the next guide loads again."""
    if not loading.cancelled():
        loading.exception()
