"""The page of outcomes: rows of what ran stand in the place of older ones, of attacks and of faults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults import page
from faults.scenario import Counts, Fault, Result, Run, Scenario, Seen


def result(name: str, *seen: Seen, failures: tuple[str, ...] = (), skipped: str | None = None) -> Result:
    runs = len(seen) + len(failures)
    return Result(
        Scenario(name, "does harm", never), list(seen), failures=list(failures), runs=runs, skipped=skipped
    )


def never(run: Run) -> Any:
    raise NotImplementedError


def counts(failed: Mapping[str, int] | None = None, recovered: float | None = 1.0, **other: Any) -> Counts:
    quiet = Counts(10, 0, failed or {}, 0, 0, longest_pause=0.5, recovered_seconds=recovered)
    return replace(quiet, **other)


def written(path: Path, *results: Result) -> list[str]:
    page.write(path, results, ["first", "second", "third"])
    return path.read_text().splitlines()


def test_rows_are_replaced_by_name_and_stand_in_order(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("\n".join(["before", "", *page.ATTACKS, "", *page.FAULTS, "", "after"]) + "\n")
    written(path, result("third", Seen(1, "old")), result("first", Seen(1, "calm")))
    lines = written(
        path, result("third", Seen(2, "worst"), Seen(1, "better")), result("second", skipped="no")
    )
    assert lines[:4] == ["before", "", *page.ATTACKS] and lines[-5:] == ["", *page.FAULTS, "", "after"]
    assert [line.split(" | ")[:4] for line in lines[4:-5]] == [
        ["| `first`: does harm", "1", "1", "calm"],
        ["| `third`: does harm", "2", "2", "worst"],
    ]


def test_failure_is_what_was_seen() -> None:
    row = page.row(result("first", Seen(1, "calm"), failures=("it hangs\nfor ever | and ever",)))
    assert row.split(" | ")[1:4] == ["2", "1", "it hangs for ever / and ever"]


def test_requests_of_all_runs_are_added_up(tmp_path: Path) -> None:
    fault = Fault("second", "ends", never, explained={"503": "nobody is there"})
    found = Result(fault, counts=[counts({"503": 2}), counts({"503": 1}, recovered=4.0)], runs=2)
    path = tmp_path / "page.md"
    path.write_text("\n".join([*page.ATTACKS, "", *page.FAULTS]) + "\n")
    cells = written(path, found)[-1].split(" | ")
    assert cells[1:9] == ["2", "2", "20", "0", "0", "3 × 503: nobody is there", "0.5 s", "2.5 / 4.0 s"]


def test_worst_note_stands_beside_the_requests() -> None:
    noted = [replace(counts(), note=Seen(-ratio, f"goodput {ratio}")) for ratio in (0.98, 0.93, 0.99)]
    row = page.row(Result(Fault("first", "ends", never), counts=noted, runs=3))
    assert row.split(" | ")[3] == "30 (goodput 0.93)"


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (counts(wrong=1), "1 of 10 texts are wrong"),
        (counts(lost=3), "3 tokens lost"),
        (counts(doubled=2), "2 doubled"),
        (counts({"500": 1}), "without an explanation: {'500': 1}"),
    ],
)
def test_harm_fails_the_run_and_is_counted(one: Counts, reason: str) -> None:
    found = Result(Fault("first", "ends", never, explained={"503": "nobody is there"}))
    found.add(counts({"503": 1}))
    with pytest.raises(AssertionError, match=re.escape(reason)):
        found.add(one)
    assert len(found.counts) == 2
