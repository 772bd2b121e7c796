"""Percentiles, goodput and the rest, against figures worked out by hand or by numpy."""

from __future__ import annotations

import random
from array import array

import numpy
import pytest

from dynamo_vllm.bench.http.answers import Answer, StageAnswers
from dynamo_vllm.bench.report import figures


def answer(ttft: float = 0.1, gaps: tuple[float, ...] = (0.01, 0.03), **more: object) -> Answer:
    first = 100.0 + ttft
    last = first + sum(gaps)
    made = {"prompt_tokens": 10, "output_tokens": len(gaps) + 1, "cached_tokens": 4, **more}
    packed = array("f", gaps).tobytes()
    events = len(gaps) + 1
    return Answer(100.0, first, last, last + 0.001, packed, events, **made)  # type: ignore[arg-type]


def stage(answers: list[Answer], seconds: float) -> StageAnswers:
    return StageAnswers("c=1", 100.0, seconds, answers)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    seconds = [random.Random(count).expovariate(5) for _ in range(count)]
    found = figures.spread(seconds)
    wanted = numpy.percentile(seconds, [50, 90, 95, 99]) * 1000
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(list(wanted), abs=1e-3)
    assert (found.mean, found.max) == pytest.approx(
        (1000 * numpy.mean(seconds), 1000 * max(seconds)), abs=1e-3
    )


def test_nothing_has_no_percentiles() -> None:
    assert figures.spread([]) == figures.Spread() and figures.spread([]).p50 is None


def test_times_of_an_answer() -> None:
    one = answer(0.1, (0.01, 0.03))
    assert figures.ttft(one) == pytest.approx(0.1)
    assert figures.tpot(one) == pytest.approx(0.02)
    assert figures.e2e(one) == pytest.approx(0.141)
    assert list(figures.gaps(one)) == pytest.approx([0.01, 0.03])
    several = answer(0.1, (0.04, 0.04), output_tokens=9)
    assert figures.tpot(several) == pytest.approx(0.01), "tokens of one event share its gap in TPOT only"
    assert figures.stage_figures(stage([several], 1.0), {}).itl_ms.p50 == pytest.approx(40)
    assert figures.tpot(answer(0.1, ())) is None, "of one token"


def test_only_complete_answers_are_measured() -> None:
    bad, left = answer(5.0, error="HTTP 500: no"), answer(7.0, aborted=True)
    found = figures.stage_figures(stage([answer(0.1), bad, bad, left], 2.0), {})
    assert (found.requests.ok, found.requests.failed, found.requests.unfinished) == (1, 2, 1)
    assert found.requests.per_second == 0.5
    assert (found.tokens.prompt, found.tokens.cached, found.tokens.output) == (10, 4, 3)
    assert found.tokens.output_per_second == 1.5
    assert found.ttft_ms.max == pytest.approx(100)
    assert found.errors == {"HTTP 500: no": 2}
    silent = figures.stage_figures(stage([answer(cached_tokens=None)], 1.0), {})
    assert (silent.tokens.cached, silent.tokens.cached_from) == (None, None)


def test_limits() -> None:
    one = answer(0.1, (0.01, 0.03))
    assert all(figures.meets(one, slo) for slo in ({"ttft": 101}, {"itl": 31}, {"tpot": 21}, {"e2e": 142}))
    above = ({"ttft": 99}, {"itl": 29}, {"tpot": 19}, {"e2e": 140}, {"ttft": 101, "e2e": 140})
    assert not any(figures.meets(one, slo) for slo in above)


def test_goodput_counts_failures_as_not_good() -> None:
    answers = [answer(0.1), answer(0.1), answer(9.0), answer(0.1, error="no")]
    found = figures.stage_figures(stage(answers, 2.0), {"ttft": 200}).goodput
    assert found is not None
    assert (found.fraction, found.per_second) == (0.5, 1.0)


def test_timeline_has_every_event_in_its_step() -> None:
    steps = figures.timeline([answer(0.1, (0.3, 0.3)), answer(0.1, ())], 100.0, 0.25)
    assert steps == [2 / 0.25, 1 / 0.25, 1 / 0.25]
