"""Tests direct egress: tokens, metrics and errors equal those of vLLM's own output path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpu.outputs import one_by_one
from harness.stack import environment
from harness.warm import FORKED, Zygote

pytestmark = pytest.mark.more


@pytest.fixture
def found(warm: Zygote, model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns the outcome of the scenario with the test's name."""
    out, log = tmp_path / "out.json", tmp_path / "log"
    args = [str(model), request.function.__name__.removeprefix("test_"), str(out)]
    child = warm.fork("cpu.direct:run", args, environment(tmp_path, **FORKED), log)
    assert child.wait(300) == 0, log.read_text()[-3000:]
    given: dict[str, Any] = json.loads(out.read_text())
    return given


def test_parity(found: dict[str, Any]) -> None:
    for name, direct in found.items():
        if not name.endswith(", direct"):
            continue
        long = found[name.replace(", direct", ", long")]
        pairs = zip(one_by_one(direct["outputs"]), one_by_one(long["outputs"]), strict=True)
        for ours, theirs in pairs:
            assert ours | {"text": None} == theirs | {"text": None}, name
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


def test_launch_that_is_interrupted_leaves_no_process(warm: Zygote, model: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out.json", tmp_path / "log"
    child = warm.fork(
        "cpu.direct:run_interrupted", [str(model), str(out)], environment(tmp_path, **FORKED), log
    )
    assert child.wait(300) == 0, log.read_text()[-3000:]
    found = json.loads(out.read_text())
    assert found["running"] > 0 and found["left"] == 0
