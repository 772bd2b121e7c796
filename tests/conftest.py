"""Marks every test with the tier whose folder it lies in."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(TESTS):  # those of a package beside us have none
            item.add_marker(item.path.relative_to(TESTS).parts[0])
