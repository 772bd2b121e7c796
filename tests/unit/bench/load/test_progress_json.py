"""Progress for programs: what a line has, and how often one comes."""

from __future__ import annotations

import io
import json

import pytest

from dynamo_vllm.bench.load.messages import StageProgress
from dynamo_vllm.bench.load.progress_json import ProgressJson


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_line_comes_each_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(monkeypatch), io.StringIO()
    progress = ProgressJson(out)
    progress.begin("c=2")
    for quarter in range(9):
        clock.now = 100 + quarter / 4
        progress.show([StageProgress(quarter, 0, 1, 40 * quarter), StageProgress(0, 1, 1, 0)])
    progress.complete([StageProgress(9, 1, 0, 400)])
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(one["seconds"], one["ended"]) for one in told] == [(1.0, False), (2.0, False), (2.0, True)]
    assert [(one["ok"], one["failed"], one["in_flight"]) for one in told] == [(4, 1, 2), (8, 1, 2), (9, 1, 0)]
    assert [one["tokens_per_second"] for one in told] == [160.0, 160.0, 0.0]
    assert told[0]["ttft_ms"] == {"p50": None, "p99": None}


def test_percentiles_are_of_all_answers_of_the_stage() -> None:
    out = io.StringIO()
    progress = ProgressJson(out)
    for stage, slowest in (("r=1", 2.0), ("r=2", 5.0)):
        progress.begin(stage)
        progress.answered([0.1] * 60)
        progress.answered([0.0] + [0.1] * 37 + [slowest] * 2)
        progress.complete([])
    first, second = (json.loads(line)["ttft_ms"] for line in out.getvalue().splitlines())
    assert first["p50"] == second["p50"] == pytest.approx(100, rel=0.02)
    assert (first["p99"], second["p99"]) == (pytest.approx(2000, rel=0.02), pytest.approx(5000, rel=0.02))


def test_other_words_are_messages_and_a_reader_that_has_gone_is_no_error() -> None:
    out = io.StringIO()
    ProgressJson(out).say("3 warm-up requests failed")
    assert json.loads(out.getvalue()) == {"message": "3 warm-up requests failed"}
    out.close()
    ProgressJson(out).say("nobody reads this")
