"""`scripts/test.py` divides the files of a tier among a few pytests, and runs what failed once more."""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import durations
import machine
import pytest
import rerun
import unchanged

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty list of tests that passed when run alone; and no suite is known."""
    path = tmp_path / "retried.toml"
    path.touch()
    monkeypatch.setattr(rerun, "RETRIED", path)
    monkeypatch.setattr(unchanged, "choose", lambda *_, **__: unchanged.Choice())
    return path


@pytest.fixture(scope="module")
def tiers() -> ModuleType:
    """By its path: the name `test` belongs to Python."""
    spec = importlib.util.spec_from_file_location("tiers", ROOT / "scripts" / "test.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_is_in_one_part_of_about_the_same_time(tiers: ModuleType) -> None:
    files = [*(ROOT / "tests" / "unit").rglob("test_*.py")]
    parts = tiers.parts(files, 3)
    assert sorted(path for part in parts for path in part) == sorted(files)
    seconds = [sum(map(tiers.seconds_of, part)) for part in parts]
    assert max(seconds) - min(seconds) < 0.1 * max(seconds)


def test_files_known_as_slow_are_there_and_run_first(tiers: ModuleType) -> None:
    files = [ROOT / name for name in tiers.SECONDS]
    assert [path for path in files if not path.exists()] == []
    slowest = max(tiers.SECONDS, key=tiers.SECONDS.get)
    assert tiers.slowest_first([ROOT / "tests" / "conftest.py", *files])[0] == ROOT / slowest


def test_slow_files_are_those_of_the_last_runs_and_of_tiers_that_did_not_run(tmp_path: Path) -> None:
    path, runs = tmp_path / "seconds.json", tmp_path / "runs"
    path.write_text('{"tests/cpu/test_a.py": 9.0, "tests/unit/test_b.py": 9.0}')
    one = {"setup": 1.0, "call": 1.0}
    tests = {"tests/unit/test_c.py::test_1": one, "tests/unit/test_c.py::test_2": one}
    tests["tests/unit/test_d.py::test"] = {"call": 1.9}
    durations.write(durations.Durations(tests), runs / "unit.json")
    durations.write_slow_files(runs, path)
    assert json.loads(path.read_text()) == {"tests/cpu/test_a.py": 9.0, "tests/unit/test_c.py": 4.0}


@pytest.mark.parametrize(
    ("names", "marks"),
    [([], "not long and not more"), (["more"], "not long and more"), (["cpu"], "not long")],
    ids=["all tiers", "the rest of all", "one tier"],
)
def test_one_tier_has_what_all_tiers_leave_to_ci(
    tiers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], marks: str
) -> None:
    called: list[list[str]] = []

    def run_pytest(_: Sequence[Path], arguments: Sequence[str]) -> int:
        called.append([*arguments])
        return 0

    (tmp_path / "tests" / "cpu").mkdir(parents=True)
    (tmp_path / "tests" / "cpu" / "test_one.py").touch()
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    monkeypatch.setattr(tiers, "run_pytest", run_pytest)
    monkeypatch.setattr(machine, "warnings", list)
    monkeypatch.delenv("PYTEST_ARGS", raising=False)
    assert tiers.main(names) == 0
    assert [arguments[-2:] for arguments in called] == [["-m", marks]]


@pytest.fixture
def ini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for a pytest without what this project sets."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a third of its start
    path = tmp_path / "empty.ini"
    path.write_text("[pytest]\n")
    return ["-c", str(path)]


ONCE = """
from pathlib import Path

def test_it():
    mark = Path(__file__).with_name("mark")
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""


def run(tiers: ModuleType, folder: Path, arguments: list[str], tries: int) -> str:
    def pytest(more: Sequence[str]) -> int:
        return int(tiers.run_pytest([folder], more))

    return rerun.run(pytest, (), arguments, folder / "cache", tries)


def test_failure_that_is_gone_when_run_alone_is_named_and_counts_the_next_time(
    tiers: ModuleType, ini: list[str], tmp_path: Path, retried: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_once.py").write_text(ONCE)
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    result = run(tiers, tmp_path, ini, 2)
    assert result == "passed; only when run alone: test_once.py::test_it"
    assert "1 failed, 1 passed" in capfd.readouterr().out
    (entry,) = rerun.retried()
    assert entry["test"] == "test_once.py::test_it" and entry["architecture"] == platform.machine()
    (tmp_path / "mark").unlink()
    assert run(tiers, tmp_path, ini, 2).startswith("FAILED, and tests/retried.toml has it already: test_once")


def test_failure_stays_one(tiers: ModuleType, ini: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_always.py").write_text("def test_it():\n    assert False\n")
    assert run(tiers, tmp_path, ini, 2) == "FAILED twice"
    assert rerun.retried() == []


@pytest.mark.parametrize(("failures", "tries"), [(1, 1), (2, 2)], ids=["one try", "two failures"])
def test_failures_are_not_run_again(failures: int, tries: int, tmp_path: Path) -> None:
    runs: list[Sequence[str]] = []

    def fail(arguments: Sequence[str]) -> int:
        runs.append(arguments)
        names = {f"test_many.py::test_{number}": True for number in range(failures)}
        rerun.file_of_failures(tmp_path).parent.mkdir(parents=True)
        rerun.file_of_failures(tmp_path).write_text(json.dumps(names))
        return rerun.FAILED

    assert rerun.run(fail, (), [], tmp_path, tries) == "FAILED"
    assert len(runs) == 1


def test_run_does_not_start_while_a_retried_test_has_no_reason_or_two_entries(
    tiers: ModuleType, monkeypatch: pytest.MonkeyPatch, retried: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTEST_ARGS", raising=False)
    rerun.write('test_a.py::test_it[a"b]')
    assert tiers.main([]) == 2
    assert 'error: tests/retried.toml: test_a.py::test_it[a"b] has no reason' in capsys.readouterr().err
    retried.write_text(retried.read_text().replace('reason = ""', 'reason = "a busy machine"'))
    assert rerun.to_mend() == []
    retried.write_text(retried.read_text() * 2)
    assert rerun.to_mend() == ['test_a.py::test_it[a"b] is there twice: mend it']


def test_failure_in_any_part_is_seen(
    tiers: ModuleType,
    ini: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passing, failing = tmp_path / "test_passing.py", tmp_path / "test_failing.py"
    passing.write_text("def test_it():\n    pass\n")
    failing.write_text(ONCE)
    durations_to = tmp_path / "durations.json"
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    result = tiers.run_parts([[passing], [failing]], ini, 2, durations_to)
    assert result == f"{rerun.ALONE}test_failing.py::test_it"
    output = capfd.readouterr().out
    assert output.count("1 passed") == 2 and output.count("1 failed") == 1
    assert {*durations.read(durations_to).tests} == {"test_passing.py::test_it", "test_failing.py::test_it"}
