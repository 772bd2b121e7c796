"""Tests what the proof of KV tiers takes for equal, wrong, and not shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tiers_proof import page
from tiers_proof.cases import BROKEN_ON_GPU, BY_NAME, CASES, FIRST_ON_GPU
from tiers_proof.compare import compare, contradiction
from tiers_proof.requests import Ask, Phase, everyday, in_other_orders
from tiers_proof.rows import Row, Table, load

TOLERANCE = 1e-3
PHASE = Phase(name="again", asks=[Ask(name="a", prompt=[1, 2])], loads=True)


def told(
    tokens: list[int],
    logprobs: list[float],
    *,
    tops: list[list[float]] | None = None,
    loaded: int = 64,
    source: str = "host",
) -> dict[str, Any]:
    choice = {"tokens": tokens, "logprobs": logprobs, "tops": [tops or []] * len(tokens)}
    answers = {"a": {"cached": 0, "prompt_logprobs": None, "choices": [choice]}}
    figures = {source: loaded} if loaded else {}
    return {"phases": [{"name": PHASE.name, "answers": answers, "figures": figures}]}


RIGHT = told([5, 6], [-1.0, -2.0], loaded=0)


MISSING: dict[str, Any] = {"phases": [{"name": "again", "answers": {}, "figures": {"host": 64}}]}
COLD = Phase(name="again", asks=PHASE.asks, loads=False)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (told([5, 6], [-1.0, -2.0]), "equal"),
        (told([5, 6], [-1.0005, -2.0]), "equal"),
        (told([5, 6], [-1.002, -2.0]), "WRONG"),
        (told([5, 6], [-1.0, float("nan")]), "WRONG"),
        (told([5, 7], [-1.0, -2.0]), "WRONG"),
        (told([5], [-1.0]), "WRONG"),
        (told([5, 6, 7], [-1.0, -2.0, -3.0]), "WRONG"),
        (told([], []), "WRONG"),
        (MISSING, "WRONG"),
        (told([5, 6], [-1.0, -2.0], loaded=0), "NOT SHOWN"),
        (told([5, 6], [-1.0, -2.0], source="device"), "NOT SHOWN"),
    ],
)
def test_verdicts(found: dict[str, Any], verdict: str) -> None:
    assert compare([PHASE], RIGHT, found, TOLERANCE).verdict == verdict


def test_tokens_from_a_tier_where_none_may_be_are_noticed() -> None:
    assert compare([COLD], RIGHT, told([5, 6], [-1.0, -2.0]), TOLERANCE).verdict == "NOT SHOWN"


@pytest.mark.parametrize(
    ("tops", "verdict"),
    [
        ([[7, -2.0], [6, -2.001]], "equal"),
        ([[7, -2.0], [6, -2.1]], "WRONG"),
        ([[7, -1.9], [6, -2.0]], "WRONG"),
        ([[7, -2.0], [8, -2.0]], "WRONG"),
    ],
)
def test_two_tokens_that_are_equally_probable_may_change_places(
    tops: list[list[float]], verdict: str
) -> None:
    right = told([5, 6], [-1.0, -2.0], tops=[[6, -2.0], [7, -2.0005]], loaded=0)
    outcome = compare([PHASE], right, told([5, 7], [-1.0, -2.0], tops=tops), TOLERANCE)
    assert (outcome.verdict, outcome.ties, outcome.loaded) == (verdict, int(verdict == "equal"), 64)


def test_engine_that_contradicts_itself_or_another_proves_nothing() -> None:
    phases = [PHASE, dataclasses.replace(PHASE, name="later")]

    def twice(tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
        return {"phases": [*RIGHT["phases"], *told(tokens, logprobs)["phases"]]}

    assert contradiction([(phases, twice([5, 6], [-1.0, -2.0]))], TOLERANCE) is None
    assert contradiction([(phases, twice([5], [-1.0]))], TOLERANCE) is None, "it may be shorter"
    assert contradiction([(phases, twice([5, 6], [-1.0, -2.1]))], TOLERANCE) is not None
    phases[1] = dataclasses.replace(PHASE, before="other-weights")
    assert contradiction([(phases, twice([5, 6], [-1.0, -2.1]))], TOLERANCE) is None
    first, other = ([PHASE], RIGHT), ([PHASE], told([5, 6], [-1.0, -2.1]))
    assert contradiction([first, first], TOLERANCE) is None
    assert contradiction([first, other], TOLERANCE) is not None


def test_crowd_is_asked_again_in_other_orders() -> None:
    asks = [Ask(name=str(number), prompt=[number]) for number in range(9)]
    crowd = Phase(name="crowd", asks=asks, together=True, before="clear")
    aborted = dataclasses.replace(crowd, name="aborted", aborts={"1": 1})
    alone = dataclasses.replace(crowd, name="alone", together=False)
    given = [crowd, aborted, alone]
    *same, one, other = in_other_orders(given, 2)
    assert same == given
    for phase in (one, other):
        assert phase.before is None and phase.together
        assert sorted(ask.name for ask in phase.asks) == [ask.name for ask in asks]
    assert asks != one.asks != other.asks != asks
    assert in_other_orders(given, 0) == given


def test_names_of_cases_are_unique_and_all_phases_of_a_plan_have_requests() -> None:
    assert len(set(CASES)) == len(CASES) < len(BY_NAME)
    assert {*FIRST_ON_GPU, *BROKEN_ON_GPU} <= set(CASES)
    for name in CASES:
        for life in BY_NAME[name].lives:
            for phase in life.plan(32):
                assert len({ask.name for ask in phase.asks}) == len(phase.asks) > 0
    assert {phase.name for phase in everyday(16)} >= {"cold", "again", "crowd", "aborted"}


def test_page_has_a_line_for_each_case_and_a_column_for_each_machine_and_tier(tmp_path: Path) -> None:
    shown = compare([PHASE], RIGHT, told([5, 6], [-1.0, -2.0], loaded=4096), TOLERANCE)
    one, other = Table("CPU", "0.32.0"), Table("H200", "0.32.0")
    one.add(Row("mha", "late-host", "WRONG", 1.0, shown), None)
    one.add(Row("gqa", "late-host", "refused", 1.0, reason="KV tiers: no"), None)
    one.add(Row("mha", "late-host", "equal", 1.0, shown), tmp_path / "one.json")
    other.add(Row("mha", "disk", "no engine", 1.0), tmp_path / "other.json")
    assert page.page([load(tmp_path / "one.json"), load(tmp_path / "other.json")]).splitlines() == [
        "| case | what | CPU, host | H200, disk |",
        "|---|---|---|---|",
        "| `gqa` | grouped-query attention, float32 | refused | — |",
        "| `mha` | multi-head attention | equal: 1 / 4,096 | no engine |",
    ]
