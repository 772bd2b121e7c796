"""The report of a stage of a load, in which a test changes what it is about."""

from __future__ import annotations

from typing import Any

from dynamo_vllm.bench.report.figures import Requests, Spread, Tokens
from dynamo_vllm.bench.report.run_report import ClientFigures, StageReport


def stage_report(**changes: Any) -> StageReport:
    times = {f"{name}_ms": Spread() for name in ("ttft", "itl", "tpot", "e2e")}
    about: dict[str, Any] = {
        **{"name": "c=32", "seconds": 2.0, "goodput": None, "processes": {}, "errors": {}, **times},
        "requests": Requests(4, 0, 0, 2.0),
        "tokens": Tokens(64, None, None, 1000, 500.0),
        "client": ClientFigures(1, 0.5, 20.0, 0.0),
    }
    return StageReport(**{**about, **changes})
