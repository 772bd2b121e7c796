"""The page of outcomes: rows of scenarios that ran stand in the place of older ones."""

from __future__ import annotations

from pathlib import Path

from faults import page
from faults.scenario import Result, Run, Scenario, Seen


def nothing(run: Run) -> Seen:
    raise NotImplementedError


def result(name: str, *seen: Seen, failures: tuple[str, ...] = (), skipped: str | None = None) -> Result:
    return Result(Scenario(name, "does harm", nothing), list(seen), list(failures), skipped)


def written(path: Path, *results: Result) -> list[str]:
    page.write(path, results, ["first", "second", "third"])
    return path.read_text().splitlines()


def test_rows_are_replaced_by_name_and_stand_in_order(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("\n".join(["before", "", *page.HEAD, "", "after"]) + "\n")
    written(path, result("third", Seen(1, "old")), result("first", Seen(1, "calm")))
    lines = written(
        path, result("third", Seen(2, "worst"), Seen(1, "better")), result("second", skipped="no")
    )
    assert lines[:4] == ["before", "", *page.HEAD] and lines[-2:] == ["", "after"]
    assert [line.split(" | ")[:4] for line in lines[4:-2]] == [
        ["| `first`: does harm", "1", "1", "calm"],
        ["| `third`: does harm", "2", "2", "worst"],
    ]


def test_failure_is_what_was_seen() -> None:
    row = page.row(result("first", Seen(1, "calm"), failures=("it hangs\nfor ever | and ever",)))
    assert row.split(" | ")[1:4] == ["2", "1", "it hangs for ever / and ever"]
