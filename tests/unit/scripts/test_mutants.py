"""`scripts/mutants.py`: which faults a module can have, where they go, and who notices them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import fault_sites
import mutants
import pytest
from fault_sites import Fault

FILE = f"{fault_sites.SRC}/room/module.py"
SOURCE = '''"""A module of 3 lines."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT: "Literal[1]" = 2

class Pool:
    def has_room(self, size: "Literal[5]", names=()) -> bool:
        """Compare 1 < 2."""
        logger.info("%d of %d", size + 1, 2)
        return size <= self.limit and "é" not in names

    async def close(self):
        await self.connection.close()
        assert self.count == 0, f"{1 + 1}"
        count = await self.settle(
            self.count
        )
        if not (count == 1 or "x" + self.name):
            return await self.next()
        self.count += 1
        return self.rest[:count]
'''


def test_faults_of_a_module_leave_texts_annotations_and_logs_alone() -> None:
    sites = fault_sites.Sites(FILE, SOURCE)
    assert [(fault.kind, fault.function, fault.new) for fault in sites.faults] == [
        (
            "return",
            "Pool.has_room",
            "return not (size <= self.limit and 'é' not in names)",
        ),
        ("operator", "Pool.has_room", 'return size <= self.limit or "é" not in names'),
        ("operator", "Pool.has_room", 'return size < self.limit and "é" not in names'),
        ("operator", "Pool.has_room", 'return size <= self.limit and "é" in names'),
        ("await", "Pool.close", "self.connection.close()"),
        ("await", "Pool.close", "count = self.settle("),
        ("operator", "Pool.close", 'if (count == 1 or "x" + self.name):'),
        ("operator", "Pool.close", 'if not (count == 1 and "x" + self.name):'),
        ("operator", "Pool.close", 'if not (count != 1 or "x" + self.name):'),
        ("bound", "Pool.close", 'if not (count == 2 or "x" + self.name):'),
        ("await", "Pool.close", "await self.next()"),
        ("operator", "Pool.close", "self.count -= 1"),
        ("bound", "Pool.close", "self.count += 2"),
        ("return", "Pool.close", "return None"),
        ("bound", "Pool.close", "return self.rest[:count + 1]"),
    ]


def test_fault_is_put_into_a_later_version_of_its_function() -> None:
    source = "def first():\n    return 1\n\ndef second(x):\n    if x:\n        return 1\n    return 1\n"
    fault = fault_sites.Sites(FILE, source).faults[-1]
    assert fault == Fault("bound", FILE, "second", "return 1", 1, "return 2")
    later = source.replace("def second", "LIMIT = 4\n\nasync def second").replace("if x", "while x")
    assert fault_sites.faulty(later, [fault]) == later.removesuffix("1\n") + "2\n"
    with pytest.raises(IndexError):
        fault_sites.faulty(source.replace("second", "third"), [fault])


def test_choice_is_spread_over_rooms_and_kinds_and_another_stands_in_for_a_skipped_fault() -> None:
    function = "async def f{0}(a, b):\n    await a()\n    b.x = {0}\n    b.y = a < b\n    return b\n\n"
    functions = "".join(function.format(number) for number in range(8))
    rooms = {"large/a": 6, "large/b": 6, "small/c": 1, "top": 2}
    sources = {f"{fault_sites.SRC}/{name}.py": functions * count for name, count in rooms.items()}
    faults = fault_sites.choose(sources, 30, 7, [])
    rooms_of_faults = [fault_sites.room_of(fault.file) for fault in faults]
    assert [rooms_of_faults.count(room) for room in ("large", "small", ".")] == [24, 2, 4]
    assert all(7 <= [fault.kind for fault in faults].count(kind) <= 8 for kind in fault_sites.KINDS)
    again = fault_sites.choose(sources, 30, 7, faults[3:4])
    assert again[:3] + again[4:] == faults[:3] + faults[4:]
    assert again[3] != faults[3] and again[3].kind == faults[3].kind
    assert fault_sites.choose(sources, 30, 8, []) != faults


def fault(new: str) -> Fault:
    return Fault("bound", FILE, "", "LIMIT = 1", 0, new)


def test_faults_that_survive_together_are_told_apart_by_the_tests_that_fail() -> None:
    a, b, harmless = fault("a"), fault("b"), fault("harmless")
    calls: list[tuple[int, int]] = []

    def run(faults: Sequence[Fault], tests: Sequence[str]) -> list[str]:
        calls.append((len(faults), len(tests)))
        failing = {f"a{number}" for number in range(99)} if a in faults else set()
        failing |= {"test_a_or_b"} if {a, b} & {*faults} else set()
        failing |= {"fails once"} if len(calls) == 1 else set()
        return sorted(test for test in failing | {"fails always"} if test in tests or "folder" in tests)

    assert mutants.noticed(run, [harmless, a, b], ["folder"]) == {a: "a0", b: "test_a_or_b"}
    assert calls[:2] == [(3, 1), (1, 8)], "few of 102 failed tests"
    assert mutants.noticed(run, [harmless, b], ["fails always"]) == {}


def test_real_tests_notice_a_fault_in_a_tree_that_is_as_before_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a third of its start
    module = tmp_path / FILE
    module.parent.mkdir(parents=True)
    (tmp_path / "build").mkdir()
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "pytest.ini").touch()
    module.write_text("LIMIT = 1\n")
    (tmp_path / "test_limit.py").write_text(
        f"def test_limit():\n    assert open({str(module)!r}).read() == 'LIMIT = 1\\n'\n"
        "def test_other():\n    pass\n"
    )
    before = module.stat().st_mtime_ns
    assert mutants.failures(tmp_path, [], 60, [fault("LIMIT = 2")], ["."]) == ["test_limit.py::test_limit"]
    assert (module.read_text(), module.stat().st_mtime_ns) == ("LIMIT = 1\n", before)


def test_results_are_continued_by_a_further_call(tmp_path: Path) -> None:
    faults = [fault("a"), fault("b")]
    results = mutants.Results(faults, tmp_path / "results.json")
    results.add("unit", faults, {faults[0]: "test_a"}, 1.5)
    results = mutants.Results(faults, tmp_path / "results.json")
    assert results.open("unit") == [] and results.open("cpu") == [faults[1]]
    assert results.table().splitlines()[1:] == [
        "bound     survives 1, unit 1",
        "await     ",
        "return    ",
        f"{FILE} : LIMIT = 1  ->  b",
    ]


def test_nearest_tests_are_those_of_the_module_then_those_of_its_room(tmp_path: Path) -> None:
    for path in ("room/test_module_errors.py", "room/module/test_it.py", "test_wire.py"):
        (tmp_path / "tests/unit" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests/unit" / path).touch()
    own = ["tests/unit/room/test_module_errors.py", "tests/unit/room/module"]
    assert mutants.nearest(tmp_path, FILE) == [own, ["tests/unit/room"]]
    assert mutants.nearest(tmp_path, f"{fault_sites.SRC}/wire.py") == [["tests/unit/test_wire.py"]] * 2
    assert mutants.nearest(tmp_path, f"{fault_sites.SRC}/export/pod.py") == []
