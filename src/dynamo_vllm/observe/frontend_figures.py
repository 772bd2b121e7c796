"""Reads the few figures of a frontend's /metrics that change with its load, without parsing the rest.

The page has hundreds of lines per worker. Prometheus' text format keeps the samples of one metric together,
so each metric is found by a search and read to its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = re.compile(rb"^(\w+)_inflight_requests\{", re.MULTILINE)
_LE = re.compile(rb'le="([^"]+)"')
_ERROR = b'status="error"'

Buckets = dict[float, float]
"""Requests or tokens at or below each upper bound, counted from the start of the frontend."""


@dataclass(frozen=True, slots=True)
class FrontendFigures:
    """Counts from the start of a frontend, over all models."""

    in_flight: float = 0.0
    requests: float = 0.0
    errors: float = 0.0
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    ttft_seconds: Buckets = field(default_factory=dict)
    """Time to the first token of requests."""
    itl_seconds: Buckets = field(default_factory=dict)
    """Time between two tokens."""


def read(page: bytes) -> FrontendFigures:
    """Return the figures; all 0 for a frontend without models, or for another page."""
    found = _PREFIX.search(page)
    if found is None:
        return FrontendFigures()
    prefix = found[1]
    requests = errors = 0.0
    for line, value in _lines(page, prefix + b"_requests_total"):
        requests += value
        errors += value if _ERROR in line else 0.0
    return FrontendFigures(
        in_flight=_sum(page, prefix + b"_inflight_requests"),
        requests=requests,
        errors=errors,
        output_tokens=_sum(page, prefix + b"_output_tokens_total"),
        prompt_tokens=_sum(page, prefix + b"_input_sequence_tokens_sum"),
        ttft_seconds=_buckets(page, prefix + b"_time_to_first_token_seconds_bucket"),
        itl_seconds=_buckets(page, prefix + b"_inter_token_latency_seconds_bucket"),
    )


def _lines(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield the samples of this name. A histogram has its sum and count between those of two models."""
    start = name + b"{"
    at = 0 if page.startswith(start) else page.find(b"\n" + start) + 1
    if at == 0 and not page.startswith(start):
        return
    family_end = page.find(b"\n# ", at)
    family_end = len(page) if family_end < 0 else family_end
    while True:
        end = page.find(b"\n", at)
        line = page[at:] if end < 0 else page[at:end]
        try:
            yield line, float(line.rpartition(b" ")[2])
        except ValueError:
            return
        if end < 0:
            return
        at = end + 1
        if not page.startswith(start, at):
            at = page.find(b"\n" + start, end, family_end) + 1
            if at == 0:
                return


def _sum(page: bytes, name: bytes) -> float:
    return sum(value for _, value in _lines(page, name))


def _buckets(page: bytes, name: bytes) -> Buckets:
    found: Buckets = {}
    for line, value in _lines(page, name):
        if bound := _LE.search(line):
            upper = float(bound[1])
            found[upper] = found.get(upper, 0.0) + value
    return found


def growth(before: Buckets, after: Buckets) -> Buckets:
    """Return what came between two readings; what stands after a restart is all new."""
    if any(after.get(upper, 0.0) < count for upper, count in before.items()):
        before = {}
    return {upper: count - before.get(upper, 0.0) for upper, count in after.items()}


def percentile(buckets: Buckets, share: float) -> float | None:
    """Return the value that this share lies at or below, between bounds by a straight line; None without any.

    What lies above the last bound counts as the last bound.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    wanted = share * total
    lower = passed = 0.0
    for upper in bounds:
        count = buckets[upper]
        if count >= wanted and count > passed:
            if upper == float("inf"):
                return lower
            return lower + (upper - lower) * (wanted - passed) / (count - passed)
        lower, passed = upper, count
    return lower


def share_within(buckets: Buckets, limit: float) -> float | None:
    """Return the share at or below a limit, between bounds by a straight line; None without any."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    lower = passed = 0.0
    for upper in bounds:
        if upper >= limit:
            part = 0.0 if upper == float("inf") or upper == lower else (limit - lower) / (upper - lower)
            return (passed + (buckets[upper] - passed) * min(1.0, part)) / total
        lower, passed = upper, buckets[upper]
    return 1.0
