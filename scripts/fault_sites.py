"""Finds the one-line faults that modules could have, chooses some of them, and puts them in."""

import ast
import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

SRC = "src/dynamo_vllm"
KINDS = ("operator", "bound", "await", "return")
SMALL_ROOM = 300  # lines; a smaller room may go without a fault
OPERATORS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in"},
    **{"and": "or", "or": "and", "+": "-", "-": "+", "+=": "-=", "-=": "+=", "not": ""},
}
OPERATOR = re.compile(r"[<>=!+-]=|[<>+-]|\bnot\s+in\b|\bin\b|\band\b|\bor\b|\bnot ")
NAMES = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Fault:
    kind: str
    file: str
    function: str
    line: str
    occurrence: int
    """Which of the lines with this text in the function, from 0."""
    new: str


class Sites:
    """Finds the one-line faults of a module."""

    def __init__(self, file: str, source: str) -> None:
        self._file = file
        self._lines = source.splitlines()
        self._places = list(zip(map(str.strip, self._lines), functions(source), strict=True))
        self.faults: list[Fault] = []
        self._visit(ast.parse(source), False)

    def _visit(self, node: ast.AST, returns_bool: bool) -> None:
        match node:
            case ast.JoinedStr() | ast.Assert() | ast.If(test=ast.Name("TYPE_CHECKING")):
                return
            case ast.Call(func=ast.Attribute(value=ast.Name("logger"))):
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                returns_bool = isinstance(node.returns, ast.Name) and node.returns.id == "bool"
            case ast.Return(value=ast.expr() as value):
                self._change_result(value, returns_bool)
        self._change_operators(node)
        self._change_bounds(node)
        self._drop_await(node)
        for name, field in ast.iter_fields(node):
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    self._visit(child, returns_bool)

    def _change_operators(self, node: ast.AST) -> None:
        operands: list[ast.expr] = []
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
            case ast.BoolOp():
                operands = node.values
            case ast.BinOp(op=ast.Add() | ast.Sub()) if not (is_text(node.left) or is_text(node.right)):
                operands = [node.left, node.right]
            case ast.AugAssign(op=ast.Add() | ast.Sub()) if not is_text(node.value):
                operands = [node.target, node.value]
            case ast.UnaryOp(op=ast.Not()):
                self._change_operator(node.lineno, node.col_offset, node.operand)
        for left, right in itertools.pairwise(operands):
            self._change_operator(left.end_lineno, left.end_col_offset, right)

    def _change_bounds(self, node: ast.AST) -> None:
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                self._replace("bound", node, str(value + 1))
            case ast.Slice():
                for bound in (node.lower, node.upper):
                    if isinstance(bound, NAMES):
                        self._replace("bound", bound, f"{ast.unparse(bound)} + 1")

    def _drop_await(self, node: ast.AST) -> None:
        match node:
            case ast.Expr(value=ast.Await() as value) | ast.Assign(value=ast.Await() as value):
                self._add("await", value.lineno, value.col_offset, value.value.col_offset, "")
            case ast.Return(value=ast.Await() as value):
                self._add("await", node.lineno, node.col_offset, value.col_offset, "")

    def _change_result(self, value: ast.expr, returns_bool: bool) -> None:
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):
            self._replace("return", value, str(not value.value))
        elif returns_bool or isinstance(value, ast.Compare):
            self._replace("return", value, f"not ({ast.unparse(value)})")
        elif not is_none(value) and not isinstance(value, ast.Await):
            self._replace("return", value, "None")

    def _change_operator(self, line: int | None, start: int | None, right: ast.expr) -> None:
        """Change what stands between this column and the right operand."""
        if line == right.lineno and start is not None:
            text = self._lines[line - 1].encode()[start : right.col_offset].decode()
            new = OPERATOR.sub(lambda match: OPERATORS[" ".join(match[0].split())], text, count=1)
            self._add("operator", line, start, right.col_offset, new)

    def _replace(self, kind: str, node: ast.expr, new: str) -> None:
        if node.lineno == node.end_lineno and node.end_col_offset is not None:
            self._add(kind, node.lineno, node.col_offset, node.end_col_offset, new)

    def _add(self, kind: str, line: int, start: int, end: int, new: str) -> None:
        """Columns are bytes, as ast has them."""
        text = self._lines[line - 1].encode()
        changed = (text[:start] + new.encode() + text[end:]).decode().strip()
        old, function = self._places[line - 1]
        if changed == old:
            return
        occurrence = self._places[: line - 1].count((old, function))
        self.faults.append(Fault(kind, self._file, function, old, occurrence, changed))


def is_text(node: ast.expr) -> bool:
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple)) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def functions(source: str) -> list[str]:
    """Return for each line the qualified name of the innermost definition around it."""
    names = [""] * len(source.splitlines())

    def name_lines(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, DEFINITIONS):
                inner = f"{scope}.{child.name}".lstrip(".")
                end = child.end_lineno or child.lineno
                names[child.lineno - 1 : end] = [inner] * (end - child.lineno + 1)
                name_lines(child, inner)
            else:
                name_lines(child, scope)

    name_lines(ast.parse(source), "")
    return names


def faulty(source: str, faults: Sequence[Fault]) -> str:
    """Return a module with these faults; LookupError if a line is no longer there."""
    lines, names = source.splitlines(), functions(source)
    changed = list(lines)
    for fault in faults:
        places = [
            number
            for number, (line, name) in enumerate(zip(lines, names, strict=True))
            if line.strip() == fault.line and name == fault.function
        ]
        number = places[fault.occurrence]
        changed[number] = lines[number].replace(fault.line, fault.new)
    return "\n".join(changed) + "\n"


def is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def room_of(file: str) -> str:
    folder, _, module = file.removeprefix(f"{SRC}/").partition("/")
    return folder if module else "."


def choose(sources: dict[str, str], count: int, seed: int, skipped: Sequence[Fault]) -> list[Fault]:
    """Choose the same faults for the same seed; another of its room and kind stands in for a skipped one."""
    lines: Counter[str] = Counter()
    candidates: dict[tuple[str, str], list[Fault]] = {}
    for file, source in sorted(sources.items()):
        lines[room_of(file)] += len(source.splitlines())
        for fault in Sites(file, source).faults:
            candidates.setdefault((room_of(file), fault.kind), []).append(fault)
    shares = {room: max(n * count / lines.total(), float(n >= SMALL_ROOM)) for room, n in lines.items()}
    numbers = {room: int(share) for room, share in shares.items()}
    by_remainder = sorted(shares, key=lambda room: numbers[room] - shares[room])
    for room in by_remainder[: count - sum(numbers.values())]:
        numbers[room] += 1
    chosen: list[Fault] = []
    kinds: Counter[str] = Counter()
    slots = [room for room in sorted(numbers) for _ in range(numbers[room])]
    random.Random(seed).shuffle(slots)
    for (room, kind), faults in candidates.items():
        random.Random(f"{seed} {room} {kind}").shuffle(faults)
    for room in slots:
        kind = min((kind for kind in KINDS if candidates.get((room, kind))), key=lambda kind: kinds[kind])
        kinds[kind] += 1
        others = {(fault.file, fault.function, fault.line) for fault in chosen}
        for fault in candidates[room, kind]:
            has_line = (fault.file, fault.function, fault.line) not in others
            if fault not in skipped and has_line and is_python(faulty(sources[fault.file], [fault])):
                chosen.append(fault)
                break
    return chosen
