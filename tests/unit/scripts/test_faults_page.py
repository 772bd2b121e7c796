"""Harm that a fault does fails its run, and is counted all the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from faults.scenario import Counts, Fault, Result, Run


def never(run: Run) -> Any:
    raise NotImplementedError


def counts(failed: Mapping[str, int] | None = None, recovered: float | None = 1.0, **other: Any) -> Counts:
    quiet = Counts(10, 0, failed or {}, 0, 0, longest_pause=0.5, recovered_seconds=recovered)
    return replace(quiet, **other)


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
