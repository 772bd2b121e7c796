"""Keeps the figures of the last hour, and makes rates and percentiles of them."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dynamo_vllm.observe.frontend_figures import FrontendFigures, growth, percentile, share_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynamo_vllm.console.data.frontends import FrontendState
    from dynamo_vllm.observe.frontend_figures import Buckets

KEPT_SECONDS = 3600.0
MOST_SAMPLES = 1800
MOST_STEPS = 360
"""Of one answer: more cannot be seen on a page."""
TTFT_SECONDS, ITL_SECONDS = 1.0, 0.05
"""A request is good if its first token came within the one, and each further one within the other."""
PER_WORKER = ("kv_used", "in_flight", "hit_rate")
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_RATES = {
    "requests_per_second": "requests",
    "output_tokens_per_second": "output_tokens",
    "prompt_tokens_per_second": "prompt_tokens",
    "errors_per_second": "errors",
}
PARTS = 10_000
"""Figures of workers are kept as whole numbers of such parts: small, and quick to read."""
NOTHING = -1
MOST = 2**31 - 1


@dataclass(slots=True)
class Sample:
    """What happened between two polls, and how things stood at the second."""

    at: float
    seconds: float
    """Since the poll before; 0 for the first one, of which nothing grew."""
    requests: float = 0.0
    errors: float = 0.0
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    in_flight: float = 0.0
    ttft_seconds: Buckets = field(default_factory=dict)
    itl_seconds: Buckets = field(default_factory=dict)
    workers: tuple[str, ...] = ()
    values: array[int] = field(default_factory=lambda: array("i"))
    """PER_WORKER of each worker, one after the other; NOTHING where there is none."""


class History:
    """A ring of samples."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._before: dict[str, FrontendFigures] = {}
        self._at: float | None = None
        self._workers: tuple[str, ...] = ()

    def add(
        self, at: float, frontends: Sequence[FrontendState], workers: Mapping[str, Mapping[str, Any]]
    ) -> Sample:
        """Add the outcome of a poll; `workers` have PER_WORKER by their ids."""
        sample = Sample(at, 0.0 if self._at is None else max(1e-3, at - self._at))
        for one in frontends:
            if one.problem is None:
                self._count(sample, one)
        self._at = at
        names = tuple(workers)
        if names != self._workers:
            self._workers = names
        sample.workers = self._workers  # the same tuple for all samples with the same workers
        values = (worker.get(name) for worker in workers.values() for name in PER_WORKER)
        sample.values = array("i", map(_parts, values))
        self._samples.append(sample)
        while self._samples[0].at < at - KEPT_SECONDS:
            self._samples.popleft()
        return sample

    def _count(self, sample: Sample, one: FrontendState) -> None:
        after = one.figures
        before = self._before.get(one.url)
        self._before[one.url] = after
        sample.in_flight += after.in_flight
        if before is None:
            return
        if after.requests < before.requests or after.output_tokens < before.output_tokens:
            before = FrontendFigures()  # it was restarted
        sample.requests += after.requests - before.requests
        sample.errors += after.errors - before.errors
        sample.output_tokens += after.output_tokens - before.output_tokens
        sample.prompt_tokens += max(0.0, after.prompt_tokens - before.prompt_tokens)
        _add(sample.ttft_seconds, growth(before.ttft_seconds, after.ttft_seconds))
        _add(sample.itl_seconds, growth(before.itl_seconds, after.itl_seconds))

    def series(
        self, seconds: float, now: float, ttft_seconds: float = TTFT_SECONDS, itl_seconds: float = ITL_SECONDS
    ) -> dict[str, Any]:
        """Return the lists of /api/history."""
        samples = [sample for sample in self._samples if sample.at > now - seconds]
        step = max(seconds / MOST_STEPS, 1.0)
        steps = _merged(samples, step)
        rows = [row(one, ttft_seconds, itl_seconds) for one in steps]
        found: dict[str, Any] = {
            name: [one[name] for one in rows] for name in ("at", *_RATES, "in_flight", "goodput")
        }
        for name in ("ttft_ms", "itl_ms"):
            found[name] = {part: [one[name][part] for one in rows] for part in _PERCENTILES}
        found["workers"] = _by_worker(steps)
        return {"step_seconds": step, "series": found}


def row(
    sample: Sample, ttft_seconds: float = TTFT_SECONDS, itl_seconds: float = ITL_SECONDS
) -> dict[str, Any]:
    """Return the figures of all workers together in one step, with None where there was nothing."""
    found: dict[str, Any] = {"at": round(sample.at, 3), "in_flight": sample.in_flight}
    for name, counted in _RATES.items():
        found[name] = getattr(sample, counted) / sample.seconds if sample.seconds else None
    found["ttft_ms"] = _percentiles(sample.ttft_seconds)
    found["itl_ms"] = _percentiles(sample.itl_seconds)
    found["goodput"] = _goodput(sample, ttft_seconds, itl_seconds)
    return found


def _parts(value: float | None) -> int:
    """Return a worker's figure in whole parts; a worker may answer anything."""
    if value is None or not value >= 0:  # also what is not a number
        return NOTHING
    return round(min(PARTS * value, MOST))


def _by_worker(steps: Sequence[Sample]) -> dict[str, dict[str, list[float | None]]]:
    """Return PER_WORKER of each worker for all steps, with None where it was not there.

    There may be 100,000 figures: each is looked at once, and steps with the same workers go together.
    """
    found: dict[str, dict[str, list[float | None]]] = {}
    begin = 0
    for workers, same in groupby(steps, key=lambda step: step.workers):
        values = [step.values for step in same]
        end = begin + len(values)
        columns = zip(*values, strict=True)
        for name in workers:
            if name not in found:
                found[name] = {part: [None] * len(steps) for part in PER_WORKER}
            for part in PER_WORKER:
                column = next(columns)
                found[name][part][begin:end] = [None if value < 0 else value / PARTS for value in column]
        begin = end
    return found


def _percentiles(buckets: Buckets) -> dict[str, float | None]:
    found = {name: percentile(buckets, share) for name, share in _PERCENTILES.items()}
    return {name: None if value is None else round(1000 * value, 3) for name, value in found.items()}


def _goodput(sample: Sample, ttft_seconds: float, itl_seconds: float) -> float | None:
    """Estimate it: two histograms do not say which request had which, so the shares are multiplied."""
    first = share_within(sample.ttft_seconds, ttft_seconds)
    if first is None:
        return None
    further = share_within(sample.itl_seconds, itl_seconds)
    return round(first * (1.0 if further is None else further), 4)


def _merged(samples: Iterable[Sample], step: float) -> list[Sample]:
    """Join the samples of each step: what happened is summed, how things stood is that of the last."""
    found: list[Sample] = []
    for sample in samples:
        if not found or sample.at // step != found[-1].at // step:
            found.append(Sample(sample.at, 0.0, ttft_seconds={}, itl_seconds={}, workers=sample.workers))
        one = found[-1]
        one.at, one.in_flight = sample.at, sample.in_flight
        one.workers, one.values = sample.workers, sample.values
        one.seconds += sample.seconds
        one.requests += sample.requests
        one.errors += sample.errors
        one.output_tokens += sample.output_tokens
        one.prompt_tokens += sample.prompt_tokens
        _add(one.ttft_seconds, sample.ttft_seconds)
        _add(one.itl_seconds, sample.itl_seconds)
    return found


def _add(to: Buckets, more: Buckets) -> None:
    for upper, count in more.items():
        to[upper] = to.get(upper, 0.0) + count
