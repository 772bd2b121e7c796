"""`scripts/machine.py` names what the tests lack before they start, and what helps."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import machine
import pytest
from machine import Need, TooFew

FILES, INSTANCES, PORTS = machine.NEEDS


def having(need: Need, available: int) -> Need:
    return dataclasses.replace(need, count=lambda most: min(most, available))


@pytest.mark.parametrize(
    ("need", "remedy"),
    [
        (FILES, "ulimit -Hn 4096"),
        (INSTANCES, "sysctl -w fs.inotify.max_user_instances=1024"),
        (PORTS, "ss -ltnp"),
    ],
    ids=["descriptors", "inotify", "ports"],
)
def test_too_few_for_one_process_end_the_run_and_too_few_for_all_are_told(need: Need, remedy: str) -> None:
    with pytest.raises(
        TooFew, match=f"the tests need {need.alone} .* there are {need.alone - 1}; .*{remedy}"
    ):
        having(need, need.alone - 1).warning()
    for available in (need.alone, need.at_once - 1):
        warning = having(need, available).warning() or ""
        assert f"there are {available}; " in warning and remedy in warning
    assert having(need, need.at_once).warning() is None


RAISES = f"""
import resource, sys
sys.path.insert(0, {str(Path(machine.__file__).parent)!r})
import machine
for soft, hard in (700, 1000), (256, 1000), (256, 300):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(machine.descriptors(500), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_limit_of_descriptors_is_raised_as_far_as_needed_and_allowed_and_never_lowered() -> None:
    """In a process of its own: a limit that was lowered stays so."""
    run = subprocess.run(
        [sys.executable, "-c", RAISES], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.splitlines() == ["500 700", "500 500", "300 300"]
