"""Each scenario of `make faults` that needs no real engine, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import clients, leaving, machine, neighbours, overload, workers
from faults.scenario import Fault, Scenario, needs_cpu_engine

from harness.faults_once import run_once

FAMILIES = (clients, neighbours, machine, workers, leaving, overload)
SCENARIOS: dict[str, Scenario | Fault] = {
    scenario.name: scenario
    for family in FAMILIES
    for scenario in family.SCENARIOS
    if scenario.refusal is not needs_cpu_engine
}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCENARIOS)
def test_others_are_served_and_nothing_is_left(name: str, model: Path) -> None:
    run_once(SCENARIOS[name], model)
