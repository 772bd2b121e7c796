"""Decides which guides may reach the engine: those that were compiled within a time and a memory.

Each is compiled in a process that can be killed (`judge_processes`): the engine's own compiler cannot be
stopped. Every guide goes through the quick lane first, the smallest before others. What takes longer than
that begins anew in the slow lane, one at a time and with the whole limit, where others need not wait for it.
What was found is kept, so that a guide costs this once.
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
from dynamo_vllm.engine.structured_output.lane import Lane, unable
from dynamo_vllm.errors import InvalidRequest, Overloaded
from dynamo_vllm.job import GUIDE_KINDS, Guide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.engine.structured_output.judge_processes import Source

QUICK_SECONDS = 0.25
"""Of processor time. With a vocabulary of 150,000 tokens a usual schema takes 0.03 to 0.1."""
SLOW_NICENESS = 10
"""More than that of the quick lane."""
WAIT_SECONDS = 30.0
WAIT_SHARE = 5.0
"""How much longer than its processor time a guide may take by the clock, on a machine with other work."""
KEPT_GUIDES = 4096
KEPT_BYTES = 32 << 20
_SIMPLER = "use fewer properties, alternatives or repetitions"


@dataclass(frozen=True, slots=True)
class Limits:
    """For one guide."""

    seconds: float = 2.0
    """Of processor time."""
    memory_bytes: int = 512 << 20

    @property
    def wait_seconds(self) -> float:
        return WAIT_SECONDS + WAIT_SHARE * self.seconds


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about a guide, for as long as it is remembered."""

    refusal: str | None = None
    backend: str | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the engine's checks made of it, as of choices a grammar."""

    @property
    def size(self) -> int:
        return 200 + len(self.refusal or "") + sum(len(v) for v in self.changes.values() if v is not None)


class Guides:
    """The judge of one worker's guides."""

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
        """Begin to make judges ready, unless that is under way."""
        if self._loading is None or self._loading.done():
            self._loading = in_thread(self._source.load)
            self._loading.add_done_callback(_hear)
        return self._loading

    async def judged(self, guide: Guide) -> Guide:
        """The guide as the engine gets it. Raises InvalidRequest, and Overloaded where its turn did not come.

        Cancelled it ends at once, and with it the judging.
        """
        fields = {f.name: v for f in dataclasses.fields(guide) if (v := getattr(guide, f.name)) is not None}
        text = json.dumps(fields)
        key = hashlib.sha256(text.encode()).digest()
        if key not in self._known and not self._source.is_loaded:
            with unable():
                await asyncio.shield(self.load())
        try:
            async with asyncio.timeout(self._limits.wait_seconds) as wait:
                verdict = await self._found(key, text)
        except TimeoutError:
            if not wait.expired():
                raise
            seconds = self._limits.wait_seconds
            raise Overloaded(f"{guide.parameter}: not judged within {seconds:g} s; try again") from None
        if verdict.refusal is not None:
            raise InvalidRequest(verdict.refusal, parameter=guide.parameter)
        return dataclasses.replace(guide, **verdict.changes, backend=verdict.backend)

    async def _found(self, key: bytes, text: str) -> Verdict:
        """Of several requests with the same guide, the first has it judged; should it leave, the next has."""
        while (verdict := self._recall(key)) is None:
            if (other := self._running.get(key)) is not None:
                await asyncio.wait([other])
                continue
            mine = self._running[key] = asyncio.get_running_loop().create_future()
            try:
                verdict = await self._judge(text)
                self._remember(key, verdict)
            finally:
                del self._running[key]
                mine.set_result(None)
        return verdict

    async def _judge(self, text: str) -> Verdict:
        answer = await self._quick.judge(text)
        if answer.get("over") == "time" and self._slow.seconds > self._quick.seconds:
            answer = await self._slow.judge(text)
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
        """All processes end, and whoever still waits is told so."""
        for lane in (self._quick, self._slow):
            lane.close()
        in_thread(self._source.close)


def _hear(loading: asyncio.Future[None]) -> None:
    """Whoever needs it asks again; asyncio would complain of an error that nobody saw."""
    if not loading.cancelled():
        loading.exception()
