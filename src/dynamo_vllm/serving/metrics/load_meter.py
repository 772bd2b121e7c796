"""Counts the worker's load for the router and for operators; `series` shows it to Prometheus."""

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
"""Tokens per second are those of this long."""
HITS_SECONDS = 60.0
"""And the hit rate is that of this long: of the traffic there is, not of all there ever was."""


class LoadPublisher(Protocol):
    """The part of the runtime's WorkerMetricsPublisher we use."""

    def publish(self, dp_rank: int | None = None, *, kv_used_blocks: int | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The counts of one rank just before a step."""

    at: float
    figures: LoadFigures


class LoadMeter:
    """Keeps the newest figures per rank and tells the router when the number of used blocks changes.

    The engine may report before the runtime is there: figures are kept and published on `connect`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.latest: dict[int, LoadFigures] = {}
        self._clock = clock
        self._samples: dict[int, deque[LoadSample]] = {}
        self._sample_due: dict[int, float] = {}
        self._total_blocks = 1
        self._published: dict[int, int] = {}
        self._publisher: LoadPublisher | None = None
        self._complained = False
        self.lost_transfers = 0
        self.lost_encodings = 0
        self.unread_answers = 0

    def count_unread_answer(self) -> None:
        """A request that was ended because its client did not read."""
        self.unread_answers += 1

    def count_lost_encoding(self) -> None:
        """Media that an encode worker should have encoded and that were encoded here."""
        self.lost_encodings += 1

    def count_lost_transfer(self) -> None:
        """A KV cache that should have come from another engine and did not."""
        self.lost_transfers += 1

    def connect(self, publisher: LoadPublisher, total_blocks: int, ranks: range) -> None:
        """First values at start, so that a router knows the worker before its first request."""
        self._publisher, self._total_blocks = publisher, max(1, total_blocks)
        for rank in ranks:
            self.record(self.latest.get(rank, LoadFigures(rank, 0, 0, 0.0)))

    def record(self, figures: LoadFigures) -> None:
        """Called for every step of the engine."""
        now = self._clock()
        if now >= self._sample_due.get(figures.rank, 0.0):
            self._sample(figures.rank, now)
        self.latest[figures.rank] = figures
        used = round(figures.kv_usage * self._total_blocks)
        if self._publisher is not None and self._published.get(figures.rank) != used:
            self._published[figures.rank] = used
            self._publish(figures.rank, used)

    def _sample(self, rank: int, now: float) -> None:
        """What was counted before this step: after a pause that is what was counted when it began."""
        before = self.latest.get(rank, LoadFigures(rank, 0, 0, 0.0))
        kept = self._samples.setdefault(rank, deque(maxlen=round(HITS_SECONDS / SAMPLE_SECONDS) + 1))
        kept.append(LoadSample(now, before))
        self._sample_due[rank] = now + SAMPLE_SECONDS

    def ranks(self) -> list[dict[str, Any]]:
        """For an operator: how full each rank is, how fast, and how much it finds in its cache."""
        now = self._clock()
        return [
            {
                "rank": rank,
                "running": latest.running,
                "waiting": latest.waiting,
                "kv_usage": latest.kv_usage,
                "hit_rate": self._hit_rate(rank, latest, now),
                "tokens_per_second": self._speed(rank, latest, now),
            }
            for rank, latest in sorted(self.latest.items())
        ]

    def _speed(self, rank: int, latest: LoadFigures, now: float) -> float:
        first = self._first(rank, now - SPEED_SECONDS)
        if first is None:
            return 0.0
        made = latest.generated_tokens - first.figures.generated_tokens
        return made / max(now - first.at, SAMPLE_SECONDS)

    def _hit_rate(self, rank: int, latest: LoadFigures, now: float) -> float | None:
        """None where nothing was looked for."""
        first = self._first(rank, now - HITS_SECONDS)
        if first is None:
            return None
        asked = latest.prefix_queries - first.figures.prefix_queries
        return (latest.prefix_hits - first.figures.prefix_hits) / asked if asked > 0 else None

    def _first(self, rank: int, since: float) -> LoadSample | None:
        """The oldest sample that is not older; None when no step was made since."""
        return next((sample for sample in self._samples.get(rank, ()) if sample.at >= since), None)

    def _publish(self, rank: int, used: int) -> None:
        """Called inside vLLM's output handler, which any exception would end, and with it the engine."""
        if self._publisher is None:
            return
        try:
            self._publisher.publish(rank, kv_used_blocks=used)
        except Exception:  # the runtime raises nothing narrower
            if not self._complained:
                self._complained = True
                logger.exception("the router does not hear of this worker's load")

    @property
    def total_blocks(self) -> int:
        return self._total_blocks


class LastError:
    """The newest error that was not the client's fault, for an operator; never anything of a request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._message = ""
        self._at: float | None = None

    def note(self, message: str) -> None:
        self._message, self._at = message, self._clock()

    def told(self) -> dict[str, Any] | None:
        if self._at is None:
            return None
        return {"message": self._message, "seconds_ago": self._clock() - self._at}
