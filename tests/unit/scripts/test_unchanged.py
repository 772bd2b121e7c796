"""Suites that need no run: what counts as their inputs, and who may say that they have passed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import unchanged

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")

TABLE = """
inputs_of_all = ["locks/*"]
stops_of_all = ["src/dynamo_vllm/main.py"]

[suites.parts]
runs = ["test"]
tests = ["tests/runtime/test_parts*.py"]
also = ["data/*"]
exist = ["docs/*"]
"""
SOURCES = {
    "tests/unchanged.toml": TABLE,
    "tests/runtime/test_parts.py": "from dynamo_vllm.codec import chunks\nimport harness.live\n",
    "tests/runtime/test_others.py": "",
    "tests/runtime/conftest.py": "",
    "tests/conftest.py": "",
    "tests/harness/live.py": 'COMMAND = "-m dynamo_vllm.main"\nSTART = "dynamo_vllm.engine:run"\n',
    "src/dynamo_vllm/__init__.py": "",
    "src/dynamo_vllm/main.py": "from dynamo_vllm import gateway\n",
    "src/dynamo_vllm/gateway.py": "",
    "src/dynamo_vllm/engine.py": "def run():\n    import dynamo_vllm.job\n",
    "src/dynamo_vllm/job.py": "",
    "src/dynamo_vllm/codec/__init__.py": "",
    "src/dynamo_vllm/codec/chunks.py": "",
    "data/deep/facts.json": "{}",
    "docs/page.md": "words",
    "locks/cpu.txt": "vllm",
}
NO_INPUTS = {
    "tests/unchanged.toml",
    "tests/runtime/test_others.py",
    "src/dynamo_vllm/gateway.py",
    "docs/page.md",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one suite."""
    monkeypatch.delenv(unchanged.EVERYTHING, raising=False)
    for path, source in SOURCES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *words: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *author, *words], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "change")


def choose(root: Path, machine: str = "x86_64", is_complete: bool = False) -> unchanged.Choice:
    return unchanged.choose(["test"], machine, is_complete, root)


def is_unchanged(root: Path, machine: str = "x86_64") -> bool:
    return [*choose(root, machine).unchanged] == ["parts"]


@pytest.fixture
def passed(root: Path) -> Path:
    """The same repository after the suite has passed."""
    choose(root).passed("parts")
    return root


def test_inputs_are_tests_what_they_import_and_what_the_table_names(root: Path) -> None:
    files = unchanged.working_files(root)
    assert files is not None
    inputs = unchanged.inputs(unchanged.suites(files)["parts"], files)
    assert inputs == sorted(SOURCES.keys() - NO_INPUTS)


def test_suite_that_passed_is_left_out_with_the_commit_that_says_so(passed: Path) -> None:
    assert "unchanged since a run that is not committed" in choose(passed).unchanged["parts"]
    commit(passed)
    choice = choose(passed)
    head = (unchanged.git(passed, "rev-parse", "--short", "HEAD") or b"").decode().strip()
    entry = json.loads((passed / unchanged.PASSES).read_text())["parts"]["x86_64"]
    assert choice.unchanged == {"parts": f"unchanged since {head} ({entry['date']}), not run"}
    assert choice.left_out("runtime") == [passed / "tests/runtime/test_parts.py"]
    assert choice.left_out("cpu") == [] and choice.changed == {}


def test_suite_runs_after_a_changed_byte_of_an_input(passed: Path) -> None:
    for path in SOURCES.keys() - NO_INPUTS:
        (passed / path).write_text(SOURCES[path] + "\n")
        assert not is_unchanged(passed), path
        (passed / path).write_text(SOURCES[path])
        assert is_unchanged(passed)


def test_suite_runs_after_a_file_more_or_less(passed: Path) -> None:
    for path in ("data/more.json", "docs/more.md", "tests/runtime/test_parts_more.py"):
        (passed / path).touch()
        assert not is_unchanged(passed)
        (passed / path).unlink()
        assert is_unchanged(passed)
    (passed / "docs/page.md").unlink()
    assert not is_unchanged(passed)


def test_suite_does_not_run_after_other_changes(passed: Path) -> None:
    for path in NO_INPUTS:
        (passed / path).write_text(SOURCES[path] + "\n")
    assert is_unchanged(passed)


def test_suite_runs_on_another_machine_in_a_complete_run_and_where_everything_must_run(
    passed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_unchanged(passed, "aarch64")
    assert choose(passed, is_complete=True).unchanged == {}
    monkeypatch.setenv(unchanged.EVERYTHING, "1")
    assert not is_unchanged(passed)


def test_without_git_all_run_and_nothing_is_written(root: Path) -> None:
    shutil.rmtree(root / ".git")
    assert choose(root).suites == {}


def test_inputs_that_change_during_the_run_have_not_passed(root: Path) -> None:
    choice = choose(root)
    (root / "data/deep/facts.json").write_text("[]")
    choice.passed("parts")
    assert not (root / unchanged.PASSES).exists()


def test_entry_that_is_not_the_hash_of_its_commit_is_found(passed: Path) -> None:
    commit(passed)
    (passed / "data/deep/facts.json").write_text("[]")
    commit(passed)  # a later change does no harm
    assert unchanged.false_entries(passed) == []
    path = passed / unchanged.PASSES
    path.write_text(path.read_text().replace('"inputs": "', '"inputs": "0'))
    assert unchanged.false_entries(passed) == []  # nobody has committed it
    commit(passed)
    (line,) = unchanged.false_entries(passed)
    assert line.startswith("tests/unchanged.json: parts on x86_64: not its inputs in ")


def test_entries_are_the_hashes_of_their_commits() -> None:
    try:
        assert unchanged.false_entries() == []
    except LookupError as exc:
        pytest.skip(str(exc))


def test_suites_are_whole_in_one_run_and_not_of_the_unit_tier() -> None:
    files = unchanged.working_files(unchanged.ROOT)
    assert files is not None or pytest.skip("not a git repository")
    for name, suite in unchanged.suites(files).items():
        tests = suite.test_files(files.paths)
        assert tests and not any(path.startswith("tests/unit/") for path in tests), name
        marked = [path for path in tests if b"mark.more" in files.read(path)]
        assert "test" not in suite.runs or marked == [], name
        assert "more" not in suite.runs or marked == tests, name
