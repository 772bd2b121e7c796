"""Tests with every supported vLLM: which environments and commands, and what the outcome is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import setup_packages
import unchanged
import versions
import yaml

ASKS_FOR_OMNI = re.compile(r"^ *if (omni\.)?lacks\(|get\(\"DYNAMO_VLLM_TEST_OMNI", re.MULTILINE)


class Runs:
    """Stands for the programs that are run: notes them, and fails those that have a word in them."""

    def __init__(self, fails: str = "nothing") -> None:
        self.fails = fails
        self.seen: list[tuple[str, Sequence[str], Mapping[str, str]]] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        self.seen.append((environment["DYNAMO_VLLM_VLLM"], command, environment))
        return int(any(self.fails in word for word in (*command, environment["DYNAMO_VLLM_VLLM"])))


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> unchanged.Choice:
    """What is known of earlier runs: nothing."""
    choice = unchanged.Choice()
    monkeypatch.setattr(unchanged, "choose", lambda *_: choice)
    monkeypatch.delenv("PYTEST_ARGS", raising=False)
    return choice


def test_every_version_has_an_environment_and_its_suites() -> None:
    runs = Runs()
    assert versions.main([], runs) == 0
    counts = {version: 5 if versions.has_omni(version) else 4 for version in setup_packages.versions()}
    assert [version for version, *_ in runs.seen] == [
        version for version, count in counts.items() for _ in range(count)
    ]
    (_, made, environment), (_, contract, _), _, (_, short, _) = runs.seen[-4:]
    assert made[1:] == [str(versions.ROOT / "scripts" / "setup.py"), "dev"]
    folder = Path(environment["DYNAMO_VLLM_VENV"])
    assert environment["PATH"].startswith(f"{folder}/bin:") and folder.name == "0.32.0"
    assert contract[0] == short[0] == str(folder / "bin" / "python")
    assert "tests/contract" in contract and "tests/cpu/test_parity.py" in short


def test_choice_of_versions_suites_and_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ARGS", "-k 'lora or media'")
    monkeypatch.setenv("DYNAMO_VLLM_EXTRAS", "omni")
    runs = Runs()
    assert versions.main(["0.31.0", "--suite", "contract"], runs) == 0
    (_, contract, environment) = runs.seen[1]
    assert len(runs.seen) == 2 and contract[-2:] == ["-k", "lora or media"]
    assert not {"PYTEST_ARGS", "DYNAMO_VLLM_EXTRAS", "DYNAMO_VLLM_TEST_OMNI"} & environment.keys()


def test_omni_is_there_where_it_is_tested_and_its_tests_may_not_be_skipped() -> None:
    runs = Runs()
    assert versions.main(["--suite", "omni"], runs) == 0
    (version, _, environment), (_, omni, _) = runs.seen
    assert version.startswith(setup_packages.OMNI_NEEDS)
    assert environment["DYNAMO_VLLM_EXTRAS"] == "omni" and environment["DYNAMO_VLLM_TEST_OMNI"]
    assert "tests/cpu/test_omni.py" in omni


def test_what_is_skipped_without_omni_is_run_with_it() -> None:
    files = [
        *Path(versions.ROOT, "tests").rglob("test_*.py"),
        *Path(versions.ROOT, "packages").rglob("test_*.py"),
    ]
    asking = [path for path in files if ASKS_FOR_OMNI.search(path.read_text())]
    assert len(asking) == len(versions.SUITES["omni"])
    run = [versions.ROOT / path.partition("::")[0] for path in versions.SUITES["omni"]]
    assert [path for path in asking if not any(path.is_relative_to(one) for one in run)] == []


def test_what_fails_is_named_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(fails="tests/contract")
    assert versions.main(["0.32.0"], runs) == 1
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("0.32.0")]
    assert [(row[1], row[-1]) for row in table] == [
        ("set-up", "passed"),
        ("contract", "FAILED"),
        ("names", "FAILED"),
        ("short", "passed"),
    ]


def test_without_an_environment_nothing_is_tested() -> None:
    runs = Runs(fails="0.31.0")
    assert versions.main(["0.31.0", "0.32.0"], runs) == 1
    assert [version for version, *_ in runs.seen] == ["0.31.0", *["0.32.0"] * 4]


def test_what_need_not_run_needs_no_environment(
    passes: unchanged.Choice, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs()
    passes.unchanged |= {"contract": "unchanged since abc (2026-11-20), not run"}
    assert versions.main(["0.31.0", "--suite", "contract", "--changed"], runs) == 0
    assert runs.seen == [] and "contract      0.0 s  unchanged since abc" in capsys.readouterr().out
    assert versions.main(["0.31.0", "--suite", "contract", "--suite", "names", "--changed"], runs) == 0
    (_, set_up, _), (_, names, _) = runs.seen
    assert set_up[-1] == "dev" and "tests/contract/test_docs_names.py" in names


def test_suites_have_the_tests_whose_inputs_are_compared() -> None:
    files = unchanged.working_files(versions.ROOT)
    assert files is not None or pytest.skip("not a git repository")
    for name, suite in unchanged.suites(files).items():
        if "versions" in suite.runs:
            left_out = [word.removeprefix("--ignore=") for word in versions.WITHOUT.get(name, ())]
            folders = [path.partition("::")[0] for path in versions.SUITES[name]]
            collected = [
                path
                for path in files.paths
                if Path(path).match("test_*.py")
                and any(Path(path).is_relative_to(folder) for folder in folders)
                and not any(Path(path).is_relative_to(folder) for folder in left_out)
            ]
            assert suite.test_files(files.paths) == sorted(collected)


def test_ci_tests_every_version_and_omni() -> None:
    """Here by one command, hosted by a job each."""
    script = Path(versions.ROOT, ".ci", "run").read_text()
    (words,) = re.findall(r'test-versions ARGS="(--others[^"]*)"', script)
    runs = Runs()
    assert versions.main(words.split(), runs) == 0
    others = [version for version in setup_packages.versions() if version != setup_packages.default_version()]
    assert [*dict.fromkeys(version for version, *_ in runs.seen)] == others
    assert any("tests/cpu/test_omni.py" in command for _, command, _ in runs.seen)
    hosted = yaml.safe_load(Path(versions.ROOT, ".github", "workflows", "ci.yml").read_text())
    assert hosted["jobs"]["test"]["strategy"]["matrix"]["vllm"] == ["default", *others]
