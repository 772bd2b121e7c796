"""Defines a scenario and its outcome for the table."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from harness import hosts


@dataclass(frozen=True)
class Seen:
    """What one run measured: of all runs, the table shows the text of that with the largest figure."""

    figure: float
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Counts:
    """What became of the requests of one run in which something failed."""

    requests: int
    wrong: int
    """Answers that differ from those of a quiet moment."""
    failed: Mapping[str, int]
    """By status, or by how the connection ended."""
    lost: int
    """Tokens that are missing in answers with an end."""
    doubled: int
    longest_pause: float
    """Seconds a client waited for the next piece of an answer."""
    recovered_seconds: float | None
    """From the fault until all parts were back and each client had a right answer; None if not measured."""
    note: Seen | None = None
    """What else was measured."""

    def harm(self, explained: Mapping[str, str]) -> str | None:
        """Why this run did not pass; only failures that the scenario explains may occur."""
        if self.wrong:
            return f"{self.wrong} of {self.requests} texts are wrong"
        if self.lost or self.doubled:
            return f"{self.lost} tokens lost, {self.doubled} doubled"
        if unexplained := {how: count for how, count in self.failed.items() if how not in explained}:
            return f"failed requests without an explanation: {unexplained}"
        return None

    def __str__(self) -> str:
        failed = ", ".join(f"{count} failed ({how})" for how, count in self.failed.items())
        recovered = "" if self.recovered_seconds is None else f"; recovered in {self.recovered_seconds:.1f} s"
        note = "" if self.note is None else f"; {self.note}"
        return (
            f"{self.requests} requests, {self.wrong} wrong, {failed or '0 failed'}; {self.lost} tokens lost, "
            f"{self.doubled} doubled; longest pause {self.longest_pause:.1f} s{recovered}{note}"
        )


@dataclass
class Sites:
    """Deployments that stand for several runs, by the function that starts them."""

    folder: Path
    model: Path
    """A tiny one, for its tokenizer."""
    _running: dict[str, Any] = field(default_factory=dict)
    _runs: Counter[str] = field(default_factory=Counter)
    _kept: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def get(
        self, start: Callable[[Path, Path], contextlib.AbstractContextManager[Any]], runs: int | None = None
    ) -> Any:
        """The deployment; with `runs` it is a new one after so many.

        `serve` waits longer before each restart of a process that ends often.
        """
        name = start.__name__
        if runs is not None and name in self._running and self._runs[name] % runs == 0:
            self.close()
        self._runs[name] += 1
        if name not in self._running:
            folder = self.folder / f"{name}-{self._runs[name]}"
            folder.mkdir()
            self._running[name] = self._kept.enter_context(start(folder, self.model))
        return self._running[name]

    def close(self) -> None:
        self._running.clear()
        self._kept.close()


@dataclass
class Run:
    """One run of a scenario."""

    number: int
    """From 1."""
    folder: Path
    """For this run only; it is kept when the run fails."""
    sites: Sites
    soak_minutes: float = 1.0

    @property
    def model(self) -> Path:
        return self.sites.model


@dataclass(frozen=True)
class Scenario:
    """An attack or a fault. `act` measures, and raises AssertionError where it does harm."""

    name: str
    what: str
    """What happens and what must be seen, for a reader of the table."""
    act: Callable[[Run], Seen]
    refusal: Callable[[], str | None] = lambda: None
    """Why it cannot run on this machine."""
    once: bool = False
    """However many runs are requested: it takes long."""


@dataclass(frozen=True)
class Fault:
    """A part fails while clients ask. `act` counts, and raises AssertionError if a part stays away."""

    name: str
    what: str
    """What fails and when, for a reader of the table."""
    act: Callable[[Run], Counts]
    refusal: Callable[[], str | None] = lambda: None
    explained: Mapping[str, str] = field(default_factory=dict)
    """Statuses with which requests may fail, and why."""


@dataclass
class Result:
    """All runs of one attack, or of one fault."""

    scenario: Scenario | Fault
    seen: list[Seen] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """One for each run that did not pass."""
    runs: int = 0
    skipped: str | None = None

    SHORT: ClassVar[int] = 200

    def add(self, outcome: Seen | Counts) -> None:
        """Of a run that went to its end."""
        if isinstance(outcome, Seen):
            self.seen.append(outcome)
            return
        assert isinstance(self.scenario, Fault)
        self.counts.append(outcome)
        if (harm := outcome.harm(self.scenario.explained)) is not None:
            raise AssertionError(harm)

    @property
    def passed(self) -> int:
        return self.runs - len(self.failures)

    @property
    def worst(self) -> str:
        """One line."""
        if self.skipped is not None:
            return f"not run: {self.skipped}"
        if self.failures:
            return " ".join(self.failures[0].split())[: self.SHORT]
        return max(self.seen, key=lambda seen: seen.figure).text


def needs_root() -> str | None:
    return None if os.geteuid() == 0 else "needs root"


def needs_hosts() -> str | None:
    return hosts.refusal()


def needs_cpu_engine() -> str | None:
    from dynamo_vllm.engine.machine import device

    return None if device() == "cpu" else "is for vLLM's CPU build"


@contextlib.contextmanager
def noted(what: str) -> Iterator[None]:
    """Says which step failed."""
    try:
        yield
    except AssertionError as exc:
        raise AssertionError(f"{what}: {exc}") from exc
