"""The figures of the last hour."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm.console.data import history
from dynamo_vllm.console.data.frontends import FrontendState
from dynamo_vllm.console.data.history import History
from dynamo_vllm.observe.frontend_figures import FrontendFigures

INF = float("inf")


def frontend(
    requests: float, tokens: float, *, problem: str | None = None, slow: float = 0.0
) -> FrontendState:
    ttft = {0.5: requests - slow, 2.0: requests, INF: requests}
    itl = {0.01: tokens, INF: tokens}
    figures = FrontendFigures(3.0, requests, 1.0, tokens, 10 * requests, ttft, itl)
    return FrontendState("frontend", "http://f", ("m",), figures, problem)


def worker(kv: float | None) -> dict[str, Any]:
    return {"kv_used": kv, "in_flight": 2, "hit_rate": None}


def test_first_poll_has_no_rates_and_the_second_those_of_what_grew() -> None:
    past = History()
    first = history.row(past.add(100.0, [frontend(10, 100)], {"a": worker(0.25)}))
    assert first["requests_per_second"] is None and first["ttft_ms"]["p50"] is None
    second = history.row(past.add(102.0, [frontend(14, 300)], {"a": worker(None)}))
    assert (second["requests_per_second"], second["output_tokens_per_second"]) == (2.0, 100.0)
    assert (second["prompt_tokens_per_second"], second["errors_per_second"]) == (20.0, 0.0)
    assert second["in_flight"] == 3.0
    assert second["ttft_ms"]["p50"] == pytest.approx(250.0)
    workers = past.series(60, 102.0)["series"]["workers"]
    assert workers == {"a": {"kv_used": [0.25, None], "in_flight": [2.0, 2.0], "hit_rate": [None, None]}}


def test_restarted_frontend_counts_from_nothing() -> None:
    past = History()
    past.add(100.0, [frontend(10, 100)], {})
    row = history.row(past.add(101.0, [frontend(3, 20)], {}))
    assert (row["requests_per_second"], row["output_tokens_per_second"]) == (3.0, 20.0)


def test_frontend_that_does_not_answer_adds_nothing_and_goes_on_where_it_was() -> None:
    past = History()
    past.add(100.0, [frontend(10, 100)], {})
    row = history.row(past.add(101.0, [frontend(0, 0, problem="gone")], {}))
    assert (row["requests_per_second"], row["in_flight"]) == (0.0, 0.0)
    assert history.row(past.add(102.0, [frontend(12, 100)], {}))["requests_per_second"] == 2.0


def test_goodput_is_the_share_within_both_limits() -> None:
    past = History()
    past.add(100.0, [frontend(0, 0)], {})
    past.add(101.0, [frontend(10, 100, slow=5)], {})
    assert past.series(60, 101.0, 0.5)["series"]["goodput"][-1] == 0.5
    assert past.series(60, 101.0, 2.0)["series"]["goodput"][-1] == 1.0
    assert past.series(60, 101.0, 2.0, 0.005)["series"]["goodput"][-1] == 0.5


def test_long_times_are_joined_into_few_steps() -> None:
    past = History()
    for second in range(0, 3600, 2):
        past.add(10_000.0 + second, [frontend(second, second)], {"a": worker(0.5)})
    found = past.series(3600, 13_600.0)
    series = found["series"]
    assert found["step_seconds"] == 10.0
    assert len(series["at"]) == 360
    assert all(len(series["workers"]["a"][name]) == 360 for name in history.PER_WORKER)
    assert series["requests_per_second"][10] == pytest.approx(1.0)


def test_worker_that_comes_later_or_back_has_nothing_before() -> None:
    past = History()
    for second, names in enumerate(("ab", "b", "bac", "ab")):
        past.add(100.0 + second, [], {name: worker(0.5 if name == "a" else 0.25) for name in names})
    workers = past.series(60, 103.0)["series"]["workers"]
    assert workers["a"]["kv_used"] == [0.5, None, 0.5, 0.5]
    assert workers["b"]["kv_used"] == [0.25] * 4
    assert workers["c"]["kv_used"] == [None, None, 0.25, None]


def test_worker_with_an_odd_figure_ends_nothing() -> None:
    for odd, shown in {float("nan"): None, -1.0: None, INF: 214748.3647}.items():
        past = History()
        past.add(100.0, [], {"a": worker(odd), "b": worker(0.5)})
        workers = past.series(60, 100.0)["series"]["workers"]
        assert (workers["a"]["kv_used"], workers["b"]["kv_used"]) == ([shown], [0.5])


def test_what_is_older_than_an_hour_goes() -> None:
    past = History()
    past.add(100.0, [], {})
    past.add(100.0 + history.KEPT_SECONDS + 1, [], {})
    assert len(past.series(3600, 100.0 + history.KEPT_SECONDS)["series"]["at"]) == 1
