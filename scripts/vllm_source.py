"""Reads a release of vLLM without importing it: a wheel, or a folder that has the package `vllm` in it."""

from __future__ import annotations

import ast
import functools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_STEPS = 12
"""The limit of re-exports and base classes to follow; more means a cycle."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """The definition of a dotted name: its module and its syntax tree."""

    module: str
    node: ast.AST

    def text(self) -> str:
        """Return the code without comments, docstrings and layout; equal texts mean equal behaviour."""
        bare = ast.parse(ast.unparse(self.node))
        for node in ast.walk(bare):
            if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        return ast.unparse(bare)


class Release:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: Callable[[str], bytes]
        if path.is_dir():
            self._files = {str(one.relative_to(path)) for one in (path / "vllm").rglob("*.py")}
            self._read = lambda name: (path / name).read_bytes()
        else:
            archive = zipfile.ZipFile(path)
            self._files = {name for name in archive.namelist() if name.endswith(".py")}
            self._read = archive.read
        if "vllm/__init__.py" not in self._files:
            raise SystemExit(f"{path} has no package called vllm")

    def version(self) -> str:
        tree = self.module("vllm._version")
        for statement in tree.body if tree else ():
            if isinstance(statement, ast.Assign) and "__version__" in bound(statement):
                return str(ast.literal_eval(statement.value))
        return self.path.name

    @functools.cache  # noqa: B019 - a release lives as long as the program
    def module(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in self._files:
                return ast.parse(self._read(file))
        return None

    def is_package(self, name: str) -> bool:
        return f"{name.replace('.', '/')}/__init__.py" in self._files

    def lookup(self, dotted: str, steps: int = MOST_STEPS) -> Found | None:
        """Find a module or a name in one, through re-exports and base classes; None if there is none."""
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if (tree := self.module(module)) is not None:
                found: Found | None = Found(module, tree)
                for part in parts[length:]:
                    found = self._member(found, part, steps) if found else None
                return found
        return None

    def _member(self, owner: Found, name: str, steps: int) -> Found | None:
        if steps == 0:
            return None
        if isinstance(owner.node, ast.Module):
            return self._in_module(owner, name, steps)
        if not isinstance(owner.node, ast.ClassDef):
            return owner  # of an object only the object is known
        for statement in statements(owner.node.body):
            if name in bound(statement):
                return Found(owner.module, statement)
        if (made := assigned(owner.node).get(name)) is not None:
            return Found(owner.module, made)
        for base in self.bases(owner, steps):
            if (found := self._member(base, name, steps - 1)) is not None:
                return found
        return None

    def _in_module(self, owner: Found, name: str, steps: int) -> Found | None:
        for statement in statements(owner.node.body):  # type: ignore[attr-defined]
            if isinstance(statement, ast.ImportFrom):
                source = self._source_of(owner.module, statement)
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        return self.lookup(f"{source}.{alias.name}", steps - 1) or Found(source, statement)
                    if alias.name == "*" and (found := self.lookup(f"{source}.{name}", steps - 1)):
                        return found
            elif name in bound(statement):
                return Found(owner.module, statement)
        return None

    def _source_of(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        up = statement.level - self.is_package(module)
        package = module.split(".")[: len(module.split(".")) - up]
        return ".".join([*package, *([statement.module] if statement.module else [])])

    def bases(self, owner: Found, steps: int = MOST_STEPS) -> Iterator[Found]:
        assert isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self.lookup(f"{owner.module}.{name}", steps - 1)
            if found is not None and isinstance(found.node, ast.ClassDef) and found.node is not owner.node:
                yield found

    def defined(self, name: str) -> list[str]:
        """Return the modules that define a class or function of this name, to find one that has moved."""
        found = []
        for file in sorted(self._files):
            if file.startswith("vllm/") and f" {name}".encode() in self._read(file):
                module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                tree = self.module(module)
                if tree and any(
                    name in bound(one) for one in tree.body if not isinstance(one, ast.ImportFrom)
                ):
                    found.append(module)
        return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also under `if` and `try`."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from statements(getattr(statement, name, []))
        for handler in statement.handlers if isinstance(statement, ast.Try) else ():
            yield from statements(handler.body)


def bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(statement, Function | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.AnnAssign):
        return {ast.unparse(statement.target)}
    if isinstance(statement, ast.Assign):
        return {
            one.id for target in statement.targets for one in ast.walk(target) if isinstance(one, ast.Name)
        }
    if isinstance(statement, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    return set()


def assigned(kind: ast.ClassDef) -> dict[str, ast.AST]:
    """Return the attributes that methods of a class set on `self`."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(kind):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in (one for each in targets for one in ast.walk(each)):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found.setdefault(target.attr, node)
    return found
