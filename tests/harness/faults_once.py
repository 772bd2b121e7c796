"""One run of a scenario of `make faults`, for a test."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from faults.scenario import Fault, Result, Run, Scenario, Sites


def run_once(scenario: Scenario | Fault, model: Path) -> None:
    """In a place that other users may enter; it is skipped where this machine cannot do it."""
    if (refusal := scenario.refusal()) is not None:
        pytest.skip(refusal)
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    place.chmod(0o755)
    sites, folder = Sites(place / "sites", model), place / "run"
    sites.folder.mkdir()
    folder.mkdir()
    try:
        Result(scenario).add(scenario.act(Run(2, folder, sites)))
    finally:
        sites.close()
        shutil.rmtree(place)
