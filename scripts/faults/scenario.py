"""Defines a scenario and its outcome for the table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from harness import hosts


@dataclass(frozen=True)
class Seen:
    """What one run measured: of all runs, the table shows the text of that with the largest figure."""

    figure: float
    text: str


@dataclass
class Sites:
    """Deployments that stand for several runs, by the function that starts them."""

    folder: Path
    model: Path
    """A tiny one, for its tokenizer."""
    _running: dict[str, Any] = field(default_factory=dict)
    _kept: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def get(self, start: Callable[[Path, Path], contextlib.AbstractContextManager[Any]]) -> Any:
        name = start.__name__
        if name not in self._running:
            folder = self.folder / name
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


@dataclass
class Result:
    """All runs of one scenario."""

    scenario: Scenario
    seen: list[Seen] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: str | None = None

    SHORT: ClassVar[int] = 200

    @property
    def runs(self) -> int:
        return len(self.seen) + len(self.failures)

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
