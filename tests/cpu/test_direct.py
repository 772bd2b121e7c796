"""Tests direct egress: tokens, metrics and errors equal those of vLLM's own output path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpu.children import Children
from cpu.direct import one_by_one

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def outcomes(children: Children, model: Path) -> dict[str, Any]:
    found: dict[str, Any] = children.ask("direct:run", str(model))
    return found


@pytest.fixture
def found(outcomes: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Returns the outcome of the scenario with the test's name."""
    return outcomes[request.function.__name__.removeprefix("test_")]


def test_parity(found: dict[str, Any]) -> None:
    for name in {name.rpartition(", ")[0] for name in found}:
        direct, long = (found[f"{name}, {way}"] for way in ("direct", "long"))
        assert one_by_one(direct["outputs"]) == one_by_one(long["outputs"]), name
        assert direct["outputs"][-1]["finished"]
        assert direct["grown"] == long["grown"], name
    last = found["long prompt, warm, direct"]["outputs"][-1]
    assert last["cached_tokens"] == 1472  # of 1500, in whole blocks of 32
    stopped = found["stop token, cold, direct"]["outputs"][-1]
    assert stopped["finish"] == "stop"
    assert isinstance(stopped["stop_reason"], int)


def test_crowd(found: dict[str, Any]) -> None:
    assert found["together"] == found["alone"]


def test_aborts(found: dict[str, Any]) -> None:
    assert [o["finish"] for o in found["queued"]] == ["abort"]
    assert found["cancelled"] == "CancelledError"
    assert found["finishes"] == ["abort"] * 3
    assert found["idle"]
    assert found["after"] == found["expected"] != []


def test_sink_that_raises(found: dict[str, Any]) -> None:
    for number, outputs in (("first", 1), ("middle", 5), ("last", 12)):
        expected = {"raised": "Broken", "outputs": outputs, "neighbour": True, "idle": True}
        assert found[number] == expected, number


def test_refusals(found: dict[str, Any]) -> None:
    for name in ("too long", "temperature", "token", "rank"):
        assert found[f"{name}, direct"] == found[f"{name}, long"], name
        assert found[f"{name}, direct"].startswith("InvalidRequest"), name
    assert found["idle"]
    assert found["after"] == 4


def test_death(found: dict[str, Any]) -> None:
    assert found == {"ended": ["EngineDead"] * 3, "again": "EngineDead"}


def test_launch_that_is_interrupted_leaves_no_process(children: Children, model: Path) -> None:
    outcome = children.ask("direct:run_interrupted", str(model))
    assert outcome["running"] > 0 and outcome["left"] == 0
