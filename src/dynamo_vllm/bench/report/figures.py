"""Computes figures from answers: percentiles, rates, goodput."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.bench.http.answers import Answer, StageAnswers

_ITL_QUANTILE = 0.99


class Spread(msgspec.Struct, frozen=True):
    """The distribution of a quantity, in ms; None if there was nothing to measure."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Requests(msgspec.Struct, frozen=True):
    ok: int
    failed: int
    unfinished: int
    """Aborted by the client before the answer was complete."""
    per_second: float


class Tokens(msgspec.Struct, frozen=True):
    prompt: int
    cached: int | None
    """Prompt tokens that the server took from a cache; None if it does not report them."""
    cached_from: str | None
    """`usage` or `metrics`."""
    output: int
    output_per_second: float


class Goodput(msgspec.Struct, frozen=True):
    slo: dict[str, float]
    fraction: float
    per_second: float


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers of one stage show."""

    name: str
    seconds: float
    requests: Requests
    tokens: Tokens
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    goodput: Goodput | None
    errors: dict[str, int]


def stage_figures(stage: StageAnswers, slo: Mapping[str, float]) -> StageFigures:
    """Compute the figures of a stage. Only complete answers count for times and tokens."""
    answers, seconds = stage.answers, stage.seconds
    good = [answer for answer in answers if is_ok(answer)]
    failed = [answer for answer in answers if answer.error]
    left = sum(answer.aborted for answer in answers)
    cached = [answer.cached_tokens for answer in good if answer.cached_tokens is not None]
    output = sum(answer.output_tokens for answer in good)
    return StageFigures(
        name=stage.name,
        seconds=round(seconds, 4),
        requests=Requests(len(good), len(failed), left, _per(len(good), seconds)),
        tokens=Tokens(
            prompt=sum(answer.prompt_tokens for answer in good),
            cached=sum(cached) if cached else None,
            cached_from="usage" if cached else None,
            output=output,
            output_per_second=_per(output, seconds),
        ),
        ttft_ms=spread([ttft(answer) for answer in good]),
        itl_ms=spread([gap for answer in good for gap in gaps(answer)]),
        tpot_ms=spread([value for answer in good if (value := tpot(answer)) is not None]),
        e2e_ms=spread([e2e(answer) for answer in good]),
        goodput=goodput(good, len(failed), seconds, slo) if slo else None,
        errors=dict(Counter(answer.error for answer in failed).most_common()),
    )


def is_ok(answer: Answer) -> bool:
    return not answer.error and not answer.aborted


def ttft(answer: Answer) -> float:
    """Return the seconds to the first token; for an empty answer, to its end."""
    return (answer.first or answer.ended) - answer.sent


def e2e(answer: Answer) -> float:
    return answer.ended - answer.sent


def gaps(answer: Answer) -> array[float]:
    """Return the seconds between events."""
    found = array("f")
    found.frombytes(answer.gaps)
    return found


def tpot(answer: Answer) -> float | None:
    """Return the seconds per token after the first one."""
    if answer.output_tokens < 2 or not answer.first:
        return None
    return (answer.last - answer.first) / (answer.output_tokens - 1)


def goodput(good: Sequence[Answer], failed: int, seconds: float, slo: Mapping[str, float]) -> Goodput:
    kept = sum(meets(answer, slo) for answer in good)
    return Goodput(dict(slo), kept / max(1, len(good) + failed), _per(kept, seconds))


def meets(answer: Answer, slo: Mapping[str, float]) -> bool:
    """Return whether an answer is within every limit."""
    seen = {"ttft": ttft(answer), "tpot": tpot(answer) or 0.0, "e2e": e2e(answer)}
    if "itl" in slo:
        seen["itl"] = quantile(sorted(gaps(answer)) or [0.0], _ITL_QUANTILE)
    return all(seen[name] * 1000 <= limit for name, limit in slo.items())


def spread(seconds: Sequence[float]) -> Spread:
    """Return mean, percentiles and maximum in ms of values in seconds."""
    if not seconds:
        return Spread()
    ordered = sorted(seconds)
    shown = [sum(ordered) / len(ordered), *(quantile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99))]
    return Spread(*(round(value * 1000, 4) for value in (*shown, ordered[-1])))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return a quantile, interpolated linearly between its two neighbours."""
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def timeline(answers: Sequence[Answer], begun: float, width: float) -> list[float]:
    """Return events per second, in steps of `width` seconds from `begun`."""
    counts: Counter[int] = Counter()
    for answer in answers:
        if not answer.first:
            continue
        at = answer.first
        counts[int((at - begun) / width)] += 1
        for gap in gaps(answer):
            at += gap
            counts[int((at - begun) / width)] += 1
    return [counts[step] / width for step in range(max(counts, default=-1) + 1)]


def _per(count: int, seconds: float) -> float:
    return round(count / seconds, 4) if seconds > 0 else 0.0
