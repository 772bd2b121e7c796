"""Runs the rounds: starts all contestants, measures them by turns, and saves each figure at once."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from harness.processes import StartFailed
from peers import observe
from peers.contestants import Contestant, Starter
from peers.environments import NotHere
from peers.figures import Row, differing
from peers.load import LoadFailed
from peers.settings import Stage

IDLE_SHARE = 0.05
"""The share of all cores that an idle server may use; one that uses more is stopped between its turns."""


@dataclass
class Record:
    """The results of a run, written to its file after every step."""

    path: Path
    command: str
    machine: Mapping[str, Any]
    setting: Mapping[str, Any]
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, list[str]] = field(default_factory=dict)
    cold: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def save(self) -> None:
        kept = ("command", "machine", "setting", "peers", "rows", "answers", "cold", "missing")
        observe.write_json(self.path, {"version": 1, **{name: getattr(self, name) for name in kept}})


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """Return the measurements of a saved record."""
    return [
        Row(r["round"], r["peer"], r["stage"], r["report"], r["main"], tuple(r["roots"]))
        for r in record["rows"]
    ]


class Match:
    """The contestants that are up; leaving it stops them."""

    def __init__(self, starter: Starter, record: Record, deadline: float = math.inf) -> None:
        self._starter = starter
        self._record = record
        self._deadline = deadline
        self._ready: list[str] = []
        self._up: dict[str, Contestant] = {}
        self._restless: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda up: up.stop(), self._up.values()))
        self._up.clear()

    def bring_up(self, names: Sequence[str], together: bool = False) -> None:
        """Start them, one after the other or all at once, and compare their answers."""
        with ThreadPoolExecutor(len(names) if together else 1) as pool:
            self._ready = [
                name for name, is_up in zip(names, pool.map(self._start, names), strict=True) if is_up
            ]
        for name in self._ready:
            self._look_at(name)
        self._compare_answers()

    def play(self, rounds: int) -> None:
        for number in range(rounds):
            for name in self._ready if number % 2 == 0 else self._ready[::-1]:
                if time.monotonic() > self._deadline:
                    say(f"the time is over: round {number + 1} of {rounds} ends before {name}")
                    return
                self._turn(name, number, rounds)

    def contestant(self, name: str) -> Contestant | None:
        return self._up.get(name)

    # -- one after the other -------------------------------------------------------------------------

    def _start(self, name: str) -> bool:
        """False and one line where it cannot run here."""
        say(f"{name}: starting …")
        try:
            self._up[name] = self._starter.start(name)
        except (NotHere, StartFailed) as exc:
            reason = str(exc)
            self._record.missing[name] = reason.splitlines()[0]
            self._record.save()
            say(f"{name}: left out: {reason}")
            return False
        say(f"{name}: answers after {self._up[name].start_seconds:.0f} s")
        return True

    def _look_at(self, name: str) -> None:
        """What it answers, and what it uses without load."""
        up = self._up[name]
        self._record.answers[name] = up.answers()
        idle = up.idle_cores()
        self._record.peers[name] = {
            "title": up.title,
            "commands": list(up.commands),
            "start_seconds": round(up.start_seconds, 1),
            "idle_cores": round(idle, 3),
            "watched": list(up.watched),
        }
        self._record.save()
        say(f"{name}: uses {100 * idle:.0f} % of a core when idle")
        if idle > IDLE_SHARE * self._record.machine["cores"]:
            say(f"{name}: NOT IDLE without load; it is stopped while others are measured")
            self._restless.add(name)
            self._up.pop(name).stop()

    def _compare_answers(self) -> None:
        lines = differing(self._record.answers)
        for line in lines:
            say(f"ANSWERS DIFFER: {line}")
        if not lines and len(self._record.answers) > 1:
            say(f"the greedy answers of {', '.join(self._record.answers)} are equal")

    def _turn(self, name: str, number: int, rounds: int) -> None:
        if name in self._restless:
            self._up[name] = self._starter.start(name)
        up = self._up[name]
        for stage in self._starter.setting.stages:
            began = time.monotonic()
            try:
                if number == 0:
                    up.measure(warm(stage), seed=10_000_000 + stage.concurrency)
                report = up.measure(stage, seed=1000 * (number + 1) + stage.concurrency)
            except LoadFailed as exc:
                say(f"round {number + 1}, {name}, {stage.name}: FAILED: {exc}")
                continue
            self._keep(up, number, stage, report)
            say(
                f"round {number + 1} of {rounds}, {name}, {stage.name}: "
                f"{report['tokens']['output_per_second']:.0f} tokens/s, "
                f"TTFT p50 {report['ttft_ms']['p50']:.1f} ms ({time.monotonic() - began:.1f} s)"
            )
        if name in self._restless:
            self._up.pop(name).stop()

    def _keep(self, up: Contestant, number: int, stage: Stage, report: dict[str, Any]) -> None:
        if report["requests"]["failed"]:
            say(
                f"{up.name}, {stage.name}: {report['requests']['failed']} REQUESTS FAILED: {report['errors']}"
            )
        row = {
            "round": number,
            "peer": up.name,
            "stage": stage.name,
            "main": up.main,
            "roots": list(up.roots),
        }
        self._record.rows.append(row | {"report": report})
        self._record.save()


def warm(stage: Stage) -> Stage:
    """Return a short stage of the same shape, to run before the first measured one."""
    return Stage(stage.concurrency, stage.concurrency, stage.input_tokens, stage.output_tokens)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
