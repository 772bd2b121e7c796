"""Nothing outside of `engine/patches` replaces an attribute of a module or class that is not ours."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "dynamo_vllm"
PATCHES = "engine/patches/"
OURS = {"dynamo_vllm", *sys.stdlib_module_names}
ROOMS = ("engine/vllm/", "engine/omni/")
METHODS_OF_ONE_OBJECT = {
    "engine/vllm/direct.py": "hooks of the one engine that the worker made, and of each of its requests",
    "engine/vllm/runs/pooling.py": "the state of one prompt, which has one result and no queue",
    "engine/vllm/output_socket.py": "the one socket of that engine, for as long as it lives",
}
"""No class changes there: without them the engine works as vLLM wrote it, only slower."""

_WRITING = re.compile(
    r"^[ \t]*(?!self\.\w+(?:: [^=\n]+)? = |cls\.\w+ = )[^=\n]*\.\w+[^=\n]* = |[sd]e[tl]attr\(|^[ \t]*del ",
    re.MULTILINE,
)
_IMPORTED = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)


class Finder(ast.NodeVisitor):
    """Follows what was imported from elsewhere through names, and notes what is written to it."""

    def __init__(self) -> None:
        self.foreign: set[str] = set()
        self.found: list[str] = []
        self.methods: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] not in OURS:
                self.foreign.add(alias.asname or alias.name.split(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and (node.module or "").split(".")[0] not in OURS:
            self.foreign |= {alias.asname or alias.name for alias in node.names}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self._bind(node.target, node.value)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._written(target)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        writes = isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr")
        if writes and node.args and self._is_foreign(node.args[0]):
            self.found.append(f"{node.lineno}: {ast.unparse(node)}")

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for inner in target.elts:
                self._bind(inner, value)
        elif isinstance(target, ast.Name) and self._is_foreign(value):
            self.foreign.add(target.id)
        else:
            self._written(target)
            if isinstance(target, ast.Attribute) and _is_own_method(value) and not _is_self(target.value):
                self.methods.append(f"{target.lineno}: {ast.unparse(target)} = {ast.unparse(value)}")

    def _written(self, target: ast.expr) -> None:
        if isinstance(target, ast.Attribute) and self._is_foreign(target.value):
            self.found.append(f"{target.lineno}: {ast.unparse(target)}")

    def _is_foreign(self, value: ast.expr) -> bool:
        """A module or class, or what holds some; what a class makes is an object of ours."""
        match value:
            case ast.Name(id=name):
                return name in self.foreign
            case ast.Attribute(value=inner):
                return self._is_foreign(inner)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return any(self._is_foreign(part) for part in parts)
            case ast.Subscript(value=inner):
                return _name(inner) == "modules" or self._is_foreign(inner)
            case ast.Call(func=function, args=[first, *_]):
                match _name(function):
                    case "import_module":
                        return True
                    case "get":
                        return isinstance(function, ast.Attribute) and _name(function.value) == "modules"
                    case "getattr":
                        return self._is_foreign(first)
        return False


def _name(value: ast.expr) -> str:
    """The last part of a dotted name."""
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""


def _is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _is_own_method(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and _is_self(value.value)


def look(source: str) -> Finder:
    finder = Finder()
    finder.visit(ast.parse(source))
    return finder


def may_reach_others(source: str) -> bool:
    """Return whether to read the syntax of a module, which for all of them takes seconds."""
    by_name = "sys.modules" in source or "import_module" in source
    return (by_name or not OURS.issuperset(_IMPORTED.findall(source))) and may_write(source)


def may_write(source: str) -> bool:
    """Return whether something may change an attribute of anything but its own object."""
    return _WRITING.search(source) is not None


@functools.cache
def elsewhere() -> dict[str, Finder]:
    sources = {str(path.relative_to(SRC)): path.read_text() for path in SRC.rglob("*.py")}
    return {
        name: look(source)
        for name, source in sources.items()
        if not name.startswith(PATCHES)
        and (name.startswith(ROOMS) and may_write(source) or may_reach_others(source))
    }


def test_foreign_modules_and_classes_are_changed_in_patches_only() -> None:
    found = [f"{name}:{line}" for name, finder in elsewhere().items() for line in finder.found]
    assert found == [], "write a patch: docs/adding-a-patch.md"


def test_methods_of_foreign_objects_are_replaced_where_there_is_a_reason() -> None:
    """Nobody can see whose an object is, but one of our methods in it is no field of its own."""
    found = {name for name, finder in elsewhere().items() if finder.methods and name.startswith(ROOMS)}
    assert found == set(METHODS_OF_ONE_OBJECT)


@pytest.mark.parametrize(
    "source",
    [
        "import vllm\nvllm.thing = 1",
        "def f():\n    from vllm.v1 import utils\n    utils.make = lambda: None",
        "from vllm import LLM\nsetattr(LLM, 'generate', None)",
        "from vllm import LLM\nLLM.generate, x = None, 1",
        "from vllm import a, b\nfor module in (a, b):\n    module.make = None",
        "from vllm import a\nowner = a.Inner\nowner.make = None",
        "from vllm import a\ngetattr(a, 'x').kernel = None",
        "import importlib\nimportlib.import_module('x').Y = None",
        "import sys\nvalues: object = sys.modules.get('prometheus_client.values')\nvalues.X = 1",
        "import nixl._api\ndel nixl._api.x",
        "import torch as t\nt.compile = None",
    ],
)
def test_checker_finds(source: str) -> None:
    assert len(look(source).found) == 1 and may_reach_others(source)


def test_checker_passes() -> None:
    for source in (
        "from vllm import SamplingParams\nparams = SamplingParams()\nparams.seed = 1",
        "from vllm import LLM\nclass Mine(LLM):\n    x = 1",
        "import sys\nsys.argv = []",
        "from dynamo_vllm.engine import machine\nmachine.device = None",
        "import torch\nx = torch.zeros(1)\nx.grad = None",
    ):
        assert look(source).found == []


def test_checker_finds_methods_that_go_into_other_objects() -> None:
    assert look("def f(self, socket):\n    socket.recv = self.recv").methods
    assert not look("def f(self):\n    self.recv = self.other").methods
