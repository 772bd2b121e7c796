"""`scripts/test.py` divides the files of a tier among a few pytests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tiers() -> ModuleType:
    """By its path: the name `test` belongs to Python."""
    spec = importlib.util.spec_from_file_location("tiers", ROOT / "scripts" / "test.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_is_in_one_part(tiers: ModuleType) -> None:
    folder = ROOT / "tests" / "unit"
    found = [path for part in tiers.parts(folder, 3) for path in part]
    assert sorted(found) == sorted(folder.rglob("test_*.py"))


def test_parts_take_about_the_same_time(tiers: ModuleType) -> None:
    seconds = [sum(map(tiers.seconds_of, part)) for part in tiers.parts(ROOT / "tests" / "unit", 3)]
    assert max(seconds) - min(seconds) < 0.1 * max(seconds)


def test_more_parts_than_files_are_not_started(tiers: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").touch()
    assert tiers.parts(tmp_path, 3) == [[tmp_path / "test_one.py"]]


def test_files_known_as_slow_are_there(tiers: ModuleType) -> None:
    names = [path.name for path in (ROOT / "tests" / "unit").rglob("test_*.py")]
    assert [names.count(name) for name in tiers.SECONDS] == [1] * len(tiers.SECONDS)


def test_failure_in_any_part_is_seen(
    tiers: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a third of its start
    (tmp_path / "empty.ini").write_text("[pytest]\n")
    passing, failing = tmp_path / "test_passing.py", tmp_path / "test_failing.py"
    passing.write_text("def test_it():\n    pass\n")
    failing.write_text("def test_it():\n    assert False\n")
    arguments = ["-p", "no:cacheprovider", "-c", str(tmp_path / "empty.ini")]
    assert tiers.run_parts([[passing], [failing]], arguments) == {0, 1}
    said = capfd.readouterr().out
    assert "1 passed" in said and "1 failed" in said
