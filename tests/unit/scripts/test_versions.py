"""Tests with every supported vLLM: which environments and commands, and what the outcome is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import setup_packages
import versions


class Runs:
    """Stands for the programs that are run: notes them, and fails those that have a word in them."""

    def __init__(self, fails: str = "nothing") -> None:
        self.fails = fails
        self.seen: list[tuple[str, Sequence[str], Mapping[str, str]]] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        self.seen.append((environment["DYNAMO_VLLM_VLLM"], command, environment))
        return int(any(self.fails in word for word in (*command, environment["DYNAMO_VLLM_VLLM"])))


def test_every_version_has_an_environment_and_all_suites() -> None:
    runs = Runs()
    assert versions.main([], runs) == 0
    assert [version for version, *_ in runs.seen] == [
        version for version in setup_packages.versions() for _ in range(3)
    ]
    (_, made, environment), (_, contract, _), (_, cpu, _) = runs.seen[-3:]
    assert made[1:] == [str(versions.ROOT / "scripts" / "setup.py"), "dev"]
    folder = Path(environment["DYNAMO_VLLM_VENV"])
    assert environment["PATH"].startswith(f"{folder}/bin:") and folder.name == "0.32.0"
    assert contract[0] == cpu[0] == str(folder / "bin" / "python")
    assert "tests/contract" in contract and "tests/cpu/test_parity.py" in cpu


def test_choice_of_versions_suites_and_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ARGS", "-k 'lora or media'")
    monkeypatch.setenv("DYNAMO_VLLM_EXTRAS", "omni")
    runs = Runs()
    assert versions.main(["0.31.0", "--suite", "contract"], runs) == 0
    (_, contract, environment) = runs.seen[1]
    assert len(runs.seen) == 2 and contract[-2:] == ["-k", "lora or media"]
    assert not {"PYTEST_ARGS", "DYNAMO_VLLM_EXTRAS"} & environment.keys()


def test_what_fails_is_named_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(fails="tests/contract")
    assert versions.main(["0.32.0"], runs) == 1
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("0.32.0")]
    assert [(row[1], row[-1]) for row in table] == [
        ("set-up", "passed"),
        ("contract", "FAILED"),
        ("cpu", "passed"),
    ]


def test_without_an_environment_nothing_is_tested() -> None:
    runs = Runs(fails="0.31.0")
    assert versions.main(["0.31.0", "0.32.0"], runs) == 1
    assert [version for version, *_ in runs.seen] == ["0.31.0", "0.32.0", "0.32.0", "0.32.0"]


def test_unknown_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        versions.main(["0.29.0"], Runs())
    assert "no lock for vLLM 0.29.0; there are 0.30.0, 0.31.0, 0.32.0" in capsys.readouterr().err


def test_files_of_the_suites_exist() -> None:
    assert all((versions.ROOT / path).exists() for paths in versions.SUITES.values() for path in paths)
