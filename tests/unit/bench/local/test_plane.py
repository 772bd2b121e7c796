"""Figures of the plane, and whom it is compared with."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm.bench.local import plane
from dynamo_vllm.bench.local.plane import Measured, PlaneFigures
from dynamo_vllm.bench.report.figures import Requests, Spread, Tokens
from dynamo_vllm.bench.report.processes import ProcessFigures
from dynamo_vllm.bench.report.run_report import ClientFigures, StageReport
from dynamo_vllm.config.options import PlaneOptions
from dynamo_vllm.config.rules import bench_local
from dynamo_vllm.errors import StartError


def stage(**changes: Any) -> StageReport:
    given: dict[str, Any] = {
        "name": "c=32",
        "seconds": 2.0,
        "requests": Requests(4, 0, 0, 2.0),
        "tokens": Tokens(64, None, None, 1000, 500.0),
        "ttft_ms": Spread(),
        "itl_ms": Spread(),
        "tpot_ms": Spread(),
        "e2e_ms": Spread(),
        "goodput": None,
        "processes": {
            "worker": ProcessFigures(0.03, 30.0, 0.03, 30.0, 100.0),
            "frontend": ProcessFigures(0.05, 50.0, 0.05, 50.0, 100.0),
        },
        "client": ClientFigures(1, 0.5, 20.0, 0.0),
        "errors": {},
    }
    return StageReport(**{**given, **changes})


def test_figures_of_a_load() -> None:
    assert plane.figures_from_load(stage()) == PlaneFigures(500.0, 30.0, 50.0, 20.0)


def test_failed_requests_spoil_a_round() -> None:
    with pytest.raises(StartError, match="2 requests failed"):
        plane.figures_from_load(stage(requests=Requests(4, 2, 0, 2.0)))


def test_worker_that_ended_spoils_a_round() -> None:
    with pytest.raises(StartError):
        plane.figures_from_load(stage(processes={**stage().processes, "worker": None}))


def test_peer_is_a_command_of_words() -> None:
    options = PlaneOptions(peer=("up=python 'a b.py' --fast",))
    assert bench_local.peers(options) == {"up": ["python", "a b.py", "--fast"]}


def test_report_says_how_many_times_faster_and_cheaper() -> None:
    ours = Measured(direct=[PlaneFigures(1000.0, 10.0), PlaneFigures(2000.0, 10.0)])
    theirs = Measured(direct=[PlaneFigures(500.0, 40.0), PlaneFigures(1000.0, 30.0)])
    text = plane.report({"dynamo-vllm": ours, "up": theirs})
    assert "dynamo-vllm against up, direct: tokens/s × 2.00 (2.00–2.00), worker CPU per token ÷ 3.50" in text
    assert "frontend" not in text.splitlines()[-1]
