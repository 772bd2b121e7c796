"""Counts the worker's load for the router and for operators; `series` formats it for Prometheus."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_vllm.engine.base import LoadFigures

if TYPE_CHECKING:
    from collections.abc import Callable


logger = logging.getLogger(__name__)
SAMPLE_SECONDS = 1.0
SPEED_SECONDS = 5.0
"""Window of the tokens per second."""
HITS_SECONDS = 60.0
"""Window of the hit rate: current traffic, not all since the start."""


class LoadPublisher(Protocol):
    """The part of the runtime's WorkerMetricsPublisher that we use."""

    def publish(self, dp_rank: int | None = None, *, kv_used_blocks: int | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The counts of one rank just before a step."""

    at: float
    figures: LoadFigures


class LoadMeter:
    """Keeps the latest figures per rank and tells the router when the number of used blocks changes.

    The engine may report before the runtime exists: figures are samples and published on `connect`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.latest: dict[int, LoadFigures] = {}
        self._clock = clock
        self._samples: dict[int, deque[LoadSample]] = {}
        self._sample_due: dict[int, float] = {}
        self._total_blocks = 1
        self._published: dict[int, int] = {}
        self._publisher: LoadPublisher | None = None
        self._has_warned = False
        self.lost_transfers = 0
        self.lost_encodings = 0
        self.unread_answers = 0

    def count_unread_answer(self) -> None:
        """Count a request that ended because its client did not read."""
        self.unread_answers += 1

    def count_lost_encoding(self) -> None:
        """Count media that were encoded here instead of on an encode worker."""
        self.lost_encodings += 1

    def count_lost_transfer(self) -> None:
        """Count a KV cache transfer that failed."""
        self.lost_transfers += 1

    def connect(self, publisher: LoadPublisher, total_blocks: int, ranks: range) -> None:
        """Publish first values at the start, so that a router knows the worker before its first request."""
        self._publisher, self._total_blocks = publisher, max(1, total_blocks)
        for rank in ranks:
            self.record(self.latest.get(rank, LoadFigures(rank, 0, 0, 0.0)))

    def record(self, figures: LoadFigures) -> None:
        """Record one step of the engine."""
        now = self._clock()
        if now >= self._sample_due.get(figures.rank, 0.0):
            self._sample(figures.rank, now)
        self.latest[figures.rank] = figures
        used = round(figures.kv_usage * self._total_blocks)
        if self._publisher is not None and self._published.get(figures.rank) != used:
            self._published[figures.rank] = used
            self._publish(figures.rank, used)

    def _sample(self, rank: int, now: float) -> None:
        """Keep the counts before this step; after a pause, those from its beginning."""
        before = self.latest.get(rank, LoadFigures(rank, 0, 0, 0.0))
        samples = self._samples.setdefault(rank, deque(maxlen=round(HITS_SECONDS / SAMPLE_SECONDS) + 1))
        samples.append(LoadSample(now, before))
        self._sample_due[rank] = now + SAMPLE_SECONDS

    def ranks(self) -> list[dict[str, Any]]:
        """Return load, speed and hit rate per rank, for an operator."""
        now = self._clock()
        return [
            {
                "rank": rank,
                "running": latest.running,
                "waiting": latest.waiting,
                "kv_usage": latest.kv_usage,
                "hit_rate": self._hit_rate(rank, latest, now),
                "tokens_per_second": self._speed(rank, now, lambda one: one.generated_tokens),
                "prompt_tokens_per_second": self._speed(rank, now, lambda one: one.prefix_queries),
            }
            for rank, latest in sorted(self.latest.items())
        ]

    def _speed(self, rank: int, now: float, counted: Callable[[LoadFigures], int]) -> float:
        """Return by how much a count grows per second; tokens of prompts count when they are looked up."""
        first = self._first(rank, now - SPEED_SECONDS)
        if first is None:
            return 0.0
        grown = counted(self.latest[rank]) - counted(first.figures)
        return grown / max(now - first.at, SAMPLE_SECONDS)

    def _hit_rate(self, rank: int, latest: LoadFigures, now: float) -> float | None:
        """Return the hit rate; None if nothing was looked up."""
        first = self._first(rank, now - HITS_SECONDS)
        if first is None:
            return None
        asked = latest.prefix_queries - first.figures.prefix_queries
        return (latest.prefix_hits - first.figures.prefix_hits) / asked if asked > 0 else None

    def _first(self, rank: int, since: float) -> LoadSample | None:
        """Return the oldest sample in the window; None if there was no step since."""
        return next((sample for sample in self._samples.get(rank, ()) if sample.at >= since), None)

    def _publish(self, rank: int, used: int) -> None:
        """Runs inside vLLM's output handler: an exception would end the handler and the engine."""
        if self._publisher is None:
            return
        try:
            self._publisher.publish(rank, kv_used_blocks=used)
        except Exception:  # the runtime raises nothing narrower
            if not self._has_warned:
                self._has_warned = True
                logger.exception("the load of this worker cannot be sent to the router")

    @property
    def total_blocks(self) -> int:
        return self._total_blocks


class LastError:
    """Keeps the latest error that was not the client's fault, for an operator; never request content."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._message = ""
        self._at: float | None = None

    def note(self, message: str) -> None:
        self._message, self._at = message, self._clock()

    def report(self) -> dict[str, object] | None:
        if self._at is None:
            return None
        return {"message": self._message, "seconds_ago": self._clock() - self._at}
