"""The JSON and the table of a run."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec

from dynamo_vllm.bench.http.answers import Answer, StageAnswers
from dynamo_vllm.bench.report import figures, processes, run_report

SPREAD = {"mean", "p50", "p90", "p95", "p99", "max"}


def stage(name: str = "c=8", **more: Any) -> run_report.StageReport:
    answers = [Answer(0.0, 0.1, 0.1, 0.2, b"", 1, 10, 1, 5), Answer(0.0, ended=0.1, error="HTTP 500: no")]
    found = figures.stage_figures(StageAnswers(name, 0.0, 2.0, answers), {"ttft": 200.0})
    given: dict[str, Any] = {
        **msgspec.structs.asdict(found),
        "processes": {"worker": processes.ProcessFigures(1.5, 150.0, 2.5, 250.0, 99.0), "gone": None},
        "client": run_report.ClientFigures(2, 0.35, 11.0, 0.0),
    }
    return run_report.StageReport(**given | more)


def run(*stages: run_report.StageReport, interrupted: bool = False) -> run_report.RunReport:
    settings = {"model": "tiny", "prompts": "random", "input_tokens": 10, "output_tokens": 1}
    return run_report.RunReport(url="http://x", settings=settings, stages=[*stages], interrupted=interrupted)


def test_json_has_the_agreed_shape() -> None:
    found = json.loads(run_report.to_json(run(stage())))
    assert set(found) == {"version", "url", "settings", "stages", "interrupted"}
    (one,) = found["stages"]
    times = [one.pop(f"{name}_ms") for name in ("ttft", "itl", "tpot", "e2e")]
    assert all(set(spread) == SPREAD for spread in times)
    assert times[1]["p50"] is None
    worker = one.pop("processes")["worker"]
    assert worker == {
        **{"cpu_seconds": 1.5, "cpu_us_per_token": 150.0, "rss_mb": 99.0},
        **{"tree_cpu_seconds": 2.5, "tree_cpu_us_per_token": 250.0},
    }
    counts = {"prompt": 10, "cached": 5, "cached_from": "usage"}
    assert one == {
        "name": "c=8",
        "seconds": 2.0,
        "requests": {"ok": 1, "failed": 1, "unfinished": 0, "per_second": 0.5},
        "tokens": {**counts, "output": 1, "output_per_second": 0.5},
        "goodput": {"slo": {"ttft": 200.0}, "fraction": 0.5, "per_second": 0.5},
        "client": {"processes": 2, "utilisation": 0.35, "cpu_us_per_token": 11.0, "late_ms": 0.0},
        "errors": {"HTTP 500: no": 1},
    }


def test_table_lines_up_and_tells_what_failed() -> None:
    text = run_report.text(run(stage("c=8"), stage("rate=0.25")))
    lines = text.splitlines()
    assert lines[0] == "http://x  model tiny  random prompts, 10/1 tokens"
    assert lines[2].split()[:5] == ["STAGE", "OK", "FAILED", "REQ/S", "TOK/S"]
    assert lines[3].split()[:6] == ["c=8", "1", "1", "0.50", "0.50", "100"]
    assert lines[3].split()[-2:] == ["50.0%", "50.0%"]
    assert len(lines[2]) == len(lines[3]) == len(lines[4])
    assert "error: c=8: 1 × HTTP 500: no" in lines
    assert any(line.split()[:3] == ["c=8", "gone", "ended"] for line in lines)
    assert "warning" not in text


def test_columns_nobody_can_fill_are_left_out() -> None:
    tokens = msgspec.structs.replace(stage().tokens, cached=None)
    text = run_report.text(run(stage(tokens=tokens, goodput=None, processes={})))
    assert not {"CACHED", "GOOD", "PROCESS"} & set(text.split())


def test_load_that_was_too_much_for_its_clients_is_told() -> None:
    busy, late = (
        run_report.ClientFigures(2, *figures) for figures in ((0.85, 11.0, 0.0), (0.35, 11.0, 80.0))
    )
    assert "a client process was busy 85% of the time" in run_report.text(run(stage(client=busy)))
    assert "a request was sent 80 ms late" in run_report.text(run(stage(client=late)))
    assert "stopped early" in run_report.text(run(stage(), interrupted=True))


# --- processes and metrics --------------------------------------------------------------------------------


def test_watched_process_is_counted_by_itself_and_with_its_children() -> None:
    def look(own: float, **children: float) -> processes.ProcessSample:
        cpu = {(1, 0.0): own} | {(int(name[1:]), 0.0): value for name, value in children.items()}
        return processes.ProcessSample(cpu, own, 3 * 1024 * 1024)

    before, after = look(1.0, c2=5.0, c3=7.0), look(1.5, c2=6.0, c4=2.0)
    found = processes.usage_between({"a": before, "b": before}, {"a": after}, 100)
    assert found == {"a": processes.ProcessFigures(0.5, 5000.0, 3.5, 35000.0, 3.0), "b": None}
    without_tokens = processes.usage_between({"a": before}, {"a": after}, 0)["a"]
    assert without_tokens is not None and without_tokens.cpu_us_per_token is None


def test_processor_time_of_this_process_is_seen() -> None:
    watch = processes.ProcessWatch({"me": os.getpid()})
    before = watch.sample()
    end = os.times().user + 0.05
    while os.times().user < end:
        pass
    used = processes.usage_between(before, watch.sample(), 1)["me"]
    assert used is not None and used.cpu_seconds >= 0.03 and used.rss_mb > 1
