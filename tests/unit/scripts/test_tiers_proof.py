"""Tests what the proof of KV tiers takes for equal, wrong, and not shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tiers_proof.compare import compare, contradiction
from tiers_proof.requests import Ask, Phase

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
