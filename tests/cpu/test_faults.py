"""Each fault of `make faults` with real engines, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import handover, operating
from faults.scenario import Fault, run_once

FAULTS: dict[str, Fault] = {
    fault.name: fault for family in (handover, operating) for fault in family.SCENARIOS
}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FAULTS)
def test_right_answers_and_every_part_comes_back(name: str, tmp_path: Path, model: Path) -> None:
    run_once(FAULTS[name], tmp_path, model)
