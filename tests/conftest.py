"""Marks every test with the tier whose folder it lies in."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts us in the background passes this on, and commands under test could not be stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(TESTS):  # those of a package beside us have none
            item.add_marker(item.path.relative_to(TESTS).parts[0])
