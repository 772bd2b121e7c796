"""Starts pytest so that it writes how long each test and fixture took, and shows the slowest of several runs.

    python scripts/durations.py --durations-to build/durations/unit.json tests/unit
    python scripts/durations.py slow-files

The file has the seconds of each test's set-up, call and teardown, and of each fixture the seconds of every
set-up, without the fixtures that it needs. With pytest-xdist the workers add the fixtures to their reports,
and the process that they report to writes the file.

The second command writes tests/seconds.json from what the last runs wrote: scripts/test.py begins with the
slowest files.
"""

import json
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

OPTION = "--durations-to"
FIXTURES = "fixture_seconds"
"""The property of a test's report that has them."""
PHASES = ("call", "setup", "teardown")
SLOW_FILES = "slow-files"
SLOW_SECONDS = 2.0  # of a file
SHORTEST_FIXTURE = 0.01  # seconds; most fixtures take less, and nobody looks for them


@dataclass
class Durations:
    tests: dict[str, dict[str, float]] = field(default_factory=dict)
    """The seconds of each phase by a test's node id."""
    fixtures: dict[str, list[float]] = field(default_factory=dict)
    """The seconds of each set-up by a fixture's folder or file, and name."""

    def add(self, other: "Durations") -> None:
        self.tests.update(other.tests)
        for name, seconds in other.fixtures.items():
            self.fixtures.setdefault(name, []).extend(seconds)

    def sum(self, phase: str) -> float:
        return sum(phases.get(phase, 0.0) for phases in self.tests.values())


def read(path: Path) -> Durations:
    """Return what a run wrote; nothing where it ended too early."""
    return Durations(**json.loads(path.read_text())) if path.exists() else Durations()


def write(durations: Durations, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"tests": durations.tests, "fixtures": durations.fixtures}
    path.write_text(json.dumps(content, indent=0, sort_keys=True) + "\n")


def merge(parts: Iterable[Path], path: Path) -> None:
    """Write what the parts of a tier wrote into one file."""
    whole = Durations()
    for part in parts:
        whole.add(read(part))
        part.unlink(missing_ok=True)
    write(whole, path)


def table(tiers: Mapping[str, Durations], count: int) -> str:
    """Return the slowest tests and fixtures of these tiers, and the sums of each tier, as text."""
    rows = [row for durations in tiers.values() for row in (*test_rows(durations), *fixture_rows(durations))]
    slowest = sorted(rows, reverse=True)[:count]
    lines = [f"slowest {len(slowest)} tests and fixtures"]
    lines += [f"{seconds:8.2f} s  {text}" for seconds, text in slowest]
    lines += ["", f"{'':<10}" + "".join(f"{phase:>12}" for phase in PHASES)]
    lines += [
        f"{tier:<10}" + "".join(f"{durations.sum(phase):10.1f} s" for phase in PHASES)
        for tier, durations in tiers.items()
    ]
    return "\n".join(lines)


def test_rows(durations: Durations) -> list[tuple[float, str]]:
    return [
        (
            sum(phases.values()),
            f"{name} ({', '.join(f'{phase} {phases.get(phase, 0):.2f}' for phase in PHASES)})",
        )
        for name, phases in durations.tests.items()
    ]


def fixture_rows(durations: Durations) -> list[tuple[float, str]]:
    return [
        (sum(seconds), f"fixture {name} ({len(seconds)} set-ups)")
        for name, seconds in durations.fixtures.items()
    ]


class Recorder:
    """Collects the durations of one run, and writes them at its end."""

    def __init__(self, path: Path, is_worker: bool) -> None:
        self._path = path
        self._is_worker = is_worker
        self._durations = Durations()
        self._fixture_seconds: list[tuple[str, float]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: "pytest.FixtureDef[Any]") -> Generator[None, Any, Any]:
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            seconds = time.perf_counter() - began
            if seconds >= SHORTEST_FIXTURE:
                name = f"{fixturedef.baseid or 'pytest'}::{fixturedef.argname}"
                self._fixture_seconds.append((name, round(seconds, 4)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.user_properties.append((FIXTURES, self._fixture_seconds))
        self._fixture_seconds = []
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._durations.tests.setdefault(report.nodeid, {})[report.when] = round(report.duration, 4)
        properties: dict[str, Any] = dict(report.user_properties)
        for name, seconds in properties.get(FIXTURES, ()):
            self._durations.fixtures.setdefault(name, []).append(seconds)

    def pytest_sessionfinish(self) -> None:
        if not self._is_worker:
            write(self._durations, self._path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, metavar="FILE", help="write the duration of each test and fixture")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption(OPTION)
    if path is not None:
        config.pluginmanager.register(Recorder(path, hasattr(config, "workerinput")))


def write_slow_files(folder: Path, path: Path) -> None:
    """Write the seconds of the slowest test files of all tiers that ran; keep those of others."""
    seconds: dict[str, float] = {} if not path.exists() else json.loads(path.read_text())
    for file in sorted(folder.glob("*.json")):
        of_tier: dict[str, float] = {}
        for test, phases in read(file).tests.items():
            name = test.partition("::")[0]
            of_tier[name] = of_tier.get(name, 0.0) + sum(phases.values())
        others = {
            name: value for name, value in seconds.items() if not name.startswith(f"tests/{file.stem}/")
        }
        slow = {name: round(value, 1) for name, value in of_tier.items() if value >= SLOW_SECONDS}
        seconds = others | slow
    path.write_text(json.dumps(seconds, indent=2, sort_keys=True) + "\n")


def main(arguments: Sequence[str]) -> int:
    if arguments == [SLOW_FILES]:
        root = Path(__file__).resolve().parent.parent
        write_slow_files(root / "build" / "durations", root / "tests" / "seconds.json")
        return 0
    sys.path.insert(0, str(Path.cwd()))  # as `python -m pytest` does: processes that a test starts import it
    return int(pytest.main(["-p", "durations", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
