"""Pages of logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.console.data import logs
from dynamo_vllm.console.data.logs import LogQuery, Logs
from harness.refusals import refused

LINES = """\
2026-11-18T08:19:04.597826Z  INFO dynamo_vllm.worker: ready
2026-11-18T08:19:05.000Z  WARN dynamo: slow
(EngineCore pid=12) ERROR 11-15 05:15:28 [core.py:100] it failed
Traceback (most recent call last):
error: the worker ends
2026-11-18T08:19:06.000Z  INFO name: \x1b[31mred\x1b[0m \x07bell
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "worker-1.log").write_text(LINES)
    return tmp_path


def texts(page: dict[str, Any]) -> list[str]:
    return [line["text"] for line in page["lines"]]


def read_backwards(folder: Path, name: str, **query: Any) -> tuple[list[str], int]:
    """All lines, read page by page from the end, and how many pages there were."""
    lines: list[str] = []
    before, pages = None, 0
    while before != 0:
        page = Logs(folder).lines(name, LogQuery(before=before, **query))
        assert before is None or page["from_byte"] <= before
        assert pages < 20
        lines, before, pages = texts(page) + lines, page["from_byte"], pages + 1
    return lines, pages


def test_last_lines_come_with_levels_and_without_escapes(folder: Path) -> None:
    found = Logs(folder).lines("worker-1", LogQuery(limit=2))
    assert [line["level"] for line in found["lines"]] == ["error", "info"]
    assert texts(found)[-1].endswith("name: red bell")
    assert found["to_byte"] == len(LINES.encode())


def test_line_without_a_level_has_that_of_the_line_above(folder: Path) -> None:
    found = Logs(folder).lines("worker-1.log", LogQuery(level="error"))
    assert texts(found)[1].startswith("Traceback") and len(found["lines"]) == 3


def test_pages_go_backwards_without_gaps(folder: Path) -> None:
    lines, pages = read_backwards(folder, "worker-1", limit=2)
    assert (lines, pages) == (texts(Logs(folder).lines("worker-1", LogQuery())), 3)


def test_new_lines_come_once_they_are_whole(folder: Path) -> None:
    end = Logs(folder).lines("worker-1", LogQuery())["to_byte"]
    with (folder / "worker-1.log").open("a") as log:
        log.write("error: more\nhalf")
    found = Logs(folder).lines("worker-1", LogQuery(after=end))
    assert texts(found) == ["error: more"]
    again = Logs(folder).lines("worker-1", LogQuery(after=found["to_byte"]))
    assert texts(again) == [] and again["to_byte"] == found["to_byte"]


def test_forward_pages_end_after_their_last_line(folder: Path) -> None:
    first = Logs(folder).lines("worker-1", LogQuery(after=0, limit=2))
    second = Logs(folder).lines("worker-1", LogQuery(after=first["to_byte"], limit=100))
    assert texts(first) + texts(second) == texts(Logs(folder).lines("worker-1", LogQuery()))


def test_text_is_looked_for_in_all_of_a_long_log(folder: Path) -> None:
    many = "".join(f"2026-11-18T08:19:06.000Z  INFO name: line {n} {'x' * 80}\n" for n in range(5000))
    (folder / "big.log").write_text(many)
    found = Logs(folder).lines("big", LogQuery(text="LINE 17 "))
    assert len(found["lines"]) == 1 and found["from_byte"] == 0
    assert many.encode()[found["lines"][0]["at_byte"] :].startswith(b"2026") and "line 17" in texts(found)[0]


def test_each_line_of_a_long_log_is_looked_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def note(text: str) -> str:
        looked_at.append(text)
        return text

    monkeypatch.setattr(logs, "harmless", note)
    monkeypatch.setattr(logs, "_STEP_BYTES", 1000)
    many = "".join(f"2026-11-18T08:19:06.000Z  INFO line {n}\n" for n in range(2000))
    (folder / "big.log").write_text(many)
    assert texts(Logs(folder).lines("big", LogQuery(text="nothing has this"))) == []
    assert len(looked_at) == 2000 == len(set(looked_at))


def test_lines_and_their_levels_do_not_depend_on_what_is_read_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = "".join(f"  File {n}\n" for n in range(40))
    (folder / "trace.log").write_text(f"{LINES}error: it ends\n{trace}2026-11-18T08:19:06.000Z  INFO on\n")
    for level, count in {None: 48, "error": 44}.items():
        monkeypatch.undo()
        expected = Logs(folder).lines("trace", LogQuery(level=level))
        assert len(expected["lines"]) == count
        for step in (1, 7, 50, 1000):
            monkeypatch.setattr(logs, "_STEP_BYTES", step)
            assert Logs(folder).lines("trace", LogQuery(level=level)) == expected, step


def test_lines_above_which_a_page_ends_have_their_level_on_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_STEP_BYTES", 64)
    monkeypatch.setattr(logs, "MOST_BYTES", 128)
    trace = "".join(f"  File {n}\n" for n in range(3))
    info = "".join(f"2026-11-18T08:19:06.000Z  INFO {n}\n" for n in range(4))
    (folder / "trace.log").write_text(f"{info}error: it ends\n{trace}{info[:-34]}")
    lines, pages = read_backwards(folder, "trace", level="error")
    assert pages == 3
    assert lines == ["error: it ends", *trace.splitlines()]


def test_one_endless_line_does_not_stop_the_pages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_BYTES", 1000)
    monkeypatch.setattr(logs, "_STEP_BYTES", 500)
    (folder / "long.log").write_text("x" * 5000 + "\nend\n")
    lines, _ = read_backwards(folder, "long")
    assert lines[-1] == "end"


def test_only_listed_logs_are_read(folder: Path) -> None:
    (folder / "secret.txt").write_text("x")
    (folder.parent / "secret.log").write_text("x")
    (folder / "link.log").symlink_to(folder.parent / "secret.log")
    assert [log["name"] for log in Logs(folder).listed()] == ["worker-1.log"]
    for name in ("../secret", "secret.txt", "link", "/etc/passwd", "worker-2", "", ".log"):
        with refused(404):
            Logs(folder).lines(name, LogQuery())
    with refused(400, "is unknown"):
        Logs(folder).lines("worker-1", LogQuery(level="loud"))


def test_deployment_elsewhere_has_no_logs(tmp_path: Path) -> None:
    assert Logs(None).listed() == [] and Logs(tmp_path / "gone").listed() == []
