"""Figures of the plane, and whom it is compared with."""

from __future__ import annotations

import pytest

from dynamo_vllm.bench.local import plane
from dynamo_vllm.bench.local.plane import Measured, PlaneFigures
from dynamo_vllm.bench.report.figures import Requests
from dynamo_vllm.bench.report.processes import ProcessFigures
from dynamo_vllm.config.options import PlaneOptions
from dynamo_vllm.config.rules import bench_local
from dynamo_vllm.errors import StartError
from harness.stage_reports import stage_report

PROCESSES = {
    "worker": ProcessFigures(0.03, 30.0, 0.03, 30.0, 100.0),
    "frontend": ProcessFigures(0.05, 50.0, 0.05, 50.0, 100.0),
}


def test_figures_of_a_load_unless_something_spoils_the_round() -> None:
    assert plane.figures_from_load(stage_report(processes=PROCESSES)) == PlaneFigures(500.0, 30.0, 50.0, 20.0)
    with pytest.raises(StartError, match="2 requests failed"):
        plane.figures_from_load(stage_report(processes=PROCESSES, requests=Requests(4, 2, 0, 2.0)))
    with pytest.raises(StartError):
        plane.figures_from_load(stage_report(processes={**PROCESSES, "worker": None}))


def test_peer_is_a_command_of_words() -> None:
    options = PlaneOptions(peer=("up=python 'a b.py' --fast",))
    assert bench_local.peers(options) == {"up": ["python", "a b.py", "--fast"]}


def test_report_says_how_many_times_faster_and_cheaper() -> None:
    ours = Measured(direct=[PlaneFigures(1000.0, 10.0), PlaneFigures(2000.0, 10.0)])
    theirs = Measured(direct=[PlaneFigures(500.0, 40.0), PlaneFigures(1000.0, 30.0)])
    text = plane.report({"dynamo-vllm": ours, "up": theirs})
    assert "dynamo-vllm against up, direct: tokens/s × 2.00 (2.00–2.00), worker CPU per token ÷ 3.50" in text
    assert "frontend" not in text.splitlines()[-1]
