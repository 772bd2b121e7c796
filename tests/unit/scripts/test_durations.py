"""`scripts/durations.py` writes how long tests and fixtures took, also of several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import durations
import pytest
from durations import Durations

TESTS = """
import time
import pytest

@pytest.fixture(scope="module")
def shared():
    time.sleep(0.05)
    yield
    time.sleep(0.03)

@pytest.fixture
def user(shared):
    pass

def test_first(user):
    time.sleep(0.04)

def test_second(user):
    pass
"""


def test_phases_and_fixtures_of_another_process_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one process: test_tiers.py."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a third of its start
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    result = tmp_path / "new folder" / "tier.json"
    xdist = ["-p", "xdist", "-n", "1"]
    command = [sys.executable, durations.__file__, durations.OPTION, str(result), str(tmp_path), *xdist]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    written = durations.read(result)
    assert list(written.tests) == ["test_it.py::test_first", "test_it.py::test_second"]
    first, second = written.tests.values()
    assert first["setup"] >= 0.05 and first["call"] >= 0.04 and second["teardown"] >= 0.03
    (seconds,) = written.fixtures["test_it.py::shared"]
    assert seconds >= 0.05 and "test_it.py::user" not in written.fixtures, "what it needs is not its own"


def test_parts_of_a_tier_become_one_file(tmp_path: Path) -> None:
    parts = [tmp_path / f"unit.{number}.json" for number in (1, 2, 3)]
    durations.write(Durations({"a.py::a": {"call": 1.0}}, {"tests::model": [2.0]}), parts[0])
    durations.write(Durations({"b.py::b": {"call": 3.0}}, {"tests::model": [4.0]}), parts[1])
    durations.merge(parts, tmp_path / "unit.json")
    whole = durations.read(tmp_path / "unit.json")
    assert whole == Durations(
        {"a.py::a": {"call": 1.0}, "b.py::b": {"call": 3.0}}, {"tests::model": [2.0, 4.0]}
    )
    assert [path.name for path in tmp_path.iterdir()] == ["unit.json"]


def test_table_has_the_slowest_of_all_tiers_and_the_sums_of_each() -> None:
    unit = Durations({"a.py::a": {"setup": 1.0, "call": 0.5, "teardown": 0.25}, "a.py::b": {"call": 0.5}})
    cpu = Durations({"c.py::c": {"setup": 9.0, "call": 2.0}}, {"tests/cpu::engine": [4.0, 5.0]})
    assert durations.table({"unit": unit, "cpu": cpu, "e2e": Durations()}, 3).splitlines() == [
        "slowest 3 tests and fixtures",
        "   11.00 s  c.py::c (call 2.00, setup 9.00, teardown 0.00)",
        "    9.00 s  fixture tests/cpu::engine (2 set-ups)",
        "    1.75 s  a.py::a (call 0.50, setup 1.00, teardown 0.25)",
        "",
        "                  call       setup    teardown",
        "unit             1.0 s       1.0 s       0.2 s",
        "cpu              2.0 s       9.0 s       0.0 s",
        "e2e              0.0 s       0.0 s       0.0 s",
    ]
