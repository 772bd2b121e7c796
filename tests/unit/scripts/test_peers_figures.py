"""The comparison with peers: ratios, spreads, and the same load for all."""

from __future__ import annotations

from peers import figures, load, settings
from peers.figures import MEASURES, Measure, Row, Spread

TOKENS = MEASURES[0]


def measured(number: int, peer: str, tokens: float, first_ms: float = 10.0, stage: str = "c=8") -> Row:
    processes = {
        "frontend": {"cpu_us_per_token": 30.0, "tree_cpu_us_per_token": 30.0},
        "worker": {"cpu_us_per_token": 50.0, "tree_cpu_us_per_token": 90.0},
        "engine": {"cpu_us_per_token": 40.0, "tree_cpu_us_per_token": 40.0},
    }
    report = {
        "tokens": {"output_per_second": tokens},
        "ttft_ms": {"p50": first_ms, "p99": first_ms},
        "processes": processes,
    }
    return Row(number, peer, stage, report, "worker", ("frontend", "worker"))


def measure(name: str) -> Measure:
    (found,) = [m for m in MEASURES if m.name == name]
    return found


# -- ratios ------------------------------------------------------------------------------------------


def test_ratio_is_taken_within_each_round_that_both_have() -> None:
    rows = [measured(0, "ours", 200), measured(0, "vllm", 100), measured(1, "vllm", 50)]
    rows += [measured(1, "ours", 75), measured(2, "ours", 300)]
    assert figures.ratios(rows, "ours", "vllm", TOKENS) == [2.0, 1.5]


def test_spread_shows_median_and_both_ends_and_one_value_alone() -> None:
    several, single = Spread.of([3.0, 1.0, 2.0]), Spread.of([1.256])
    assert several and several.show() == "2.00 (1.00–3.00)"
    assert single and single.show(1) == "1.3"
    assert Spread.of([]) is None


def test_cpu_of_a_peer_counts_every_process_once_and_a_missing_figure_is_no_zero() -> None:
    row = measured(0, "ours", 100)
    assert measure("main process CPU").of(row) == 50.0
    assert measure("all CPU").of(row) == 120.0  # the engine is in the worker's tree
    missing = Row(0, "ours", "c=8", {"ttft_ms": {"p50": None}, "processes": {}}, "worker", ("worker",))
    assert [m.of(missing) for m in MEASURES] == [None] * len(MEASURES)


# -- tables ------------------------------------------------------------------------------------------


# -- markers -----------------------------------------------------------------------------------------


# -- the record --------------------------------------------------------------------------------------


# -- what is sent and started ------------------------------------------------------------------------


def test_every_peer_gets_the_same_load() -> None:
    stage = settings.Stage(8, 64)
    words = load.words("http://a", stage, 5, None)
    assert words[1:] == load.words("http://b", stage, 5, None)[1:]
    assert "--requests" in words and "--seconds" not in words
    assert "--seconds" in load.words("http://a", settings.Stage(8, 64, seconds=3), 5, 4)
