"""Each fault of `make faults` that needs a real engine, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.run import SCENARIOS
from faults.scenario import needs_cpu_engine

from harness.faults_once import run_once

REAL = [name for name, scenario in SCENARIOS.items() if scenario.refusal is needs_cpu_engine]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", REAL)
def test_answers_go_on_and_nothing_is_left(name: str, model: Path) -> None:
    run_once(SCENARIOS[name], model)
