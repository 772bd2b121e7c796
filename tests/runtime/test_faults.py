"""Each scenario of `make faults` that needs no real engine, once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import clients, machine, neighbours, network, planes, soak, surroundings, workers
from faults.scenario import Fault, Result, Run, Scenario, Sites

FAMILIES = (clients, neighbours, machine, workers, network, planes, surroundings, soak)
SCENARIOS: dict[str, Scenario | Fault] = {
    scenario.name: scenario for family in FAMILIES for scenario in family.SCENARIOS
}


@pytest.fixture
def place() -> Iterator[Path]:
    """One that other users may enter."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCENARIOS)
def test_others_are_served_and_nothing_is_left(name: str, place: Path, model: Path) -> None:
    if (refusal := SCENARIOS[name].refusal()) is not None:
        pytest.skip(refusal)
    sites, folder = Sites(place / "sites", model), place / "run"
    sites.folder.mkdir()
    folder.mkdir()
    try:
        Result(SCENARIOS[name]).add(SCENARIOS[name].act(Run(2, folder, sites)))
    finally:
        sites.close()
