"""Starts frontends with real engines for a test, a module, or modules one after the other."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from cpu.completions import complete
from cpu.pairs import Pairs
from harness.forks import RUN_COMMAND
from harness.processes import COMMAND
from harness.stack import Stack, stack
from harness.waiting import until
from harness.warm import Zygote


@dataclass
class Start:
    """Starts stacks that end together."""

    warm: Zygote
    model: Path
    folders: pytest.TempPathFactory
    _held: contextlib.ExitStack

    def __call__(
        self,
        *flags: str,
        model: Path | None = None,
        workers: int = 1,
        frontend: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        call: str = RUN_COMMAND,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> Stack:
        """`flags`, `env` and `call` are those of the workers, `settings` the environment of every process."""
        deployment = self.frontend(*frontend, **settings)
        for _ in range(workers):
            self.warm.start_worker(deployment, model or self.model, *flags, env=env, call=call)
        return deployment.wait_ready(120)

    def frontend(self, *flags: str, **settings: str) -> Stack:
        deployment = self.empty(**settings)
        deployment.start_frontend(*flags)
        return deployment

    def empty(self, **settings: str) -> Stack:
        return self._held.enter_context(stack(self.folders.mktemp("stack"), **settings))

    def pair(
        self,
        *flags: str,
        model: Path | None = None,
        frontend: tuple[str, ...] = (),
        call: str = RUN_COMMAND,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> Pairs:
        """A prefill and a decode worker over NIXL."""
        stack = self.frontend(*frontend, **settings)
        deployment = Pairs(stack, self.warm, model or self.model, flags, call)
        for role in ("decode", "prefill"):
            deployment.add(role)
        deployment.stack.wait_ready(120).wait_over_two()
        return deployment


@contextlib.contextmanager
def starting(warm: Zygote, model: Path, folders: pytest.TempPathFactory) -> Iterator[Start]:
    with contextlib.ExitStack() as held:
        yield Start(warm, model, folders, held)


@dataclass
class Shared:
    """Lends a stack to one module after the other; one that is not as it was is started again."""

    start: Start
    _lent: dict[str, tuple[Pairs | Stack, str]] = field(default_factory=dict)

    def __call__(self, *flags: str) -> Stack:
        lent = self._proven(" ".join(flags), functools.partial(self.start, *flags))
        assert isinstance(lent, Stack)
        return lent

    def pair(self, *flags: str, settings: Mapping[str, str]) -> Pairs:
        lent = self._proven(f"pair {flags}", functools.partial(self.start.pair, *flags, settings=settings))
        assert isinstance(lent, Pairs)
        return lent

    def _proven(self, name: str, start: Callable[[], Pairs | Stack]) -> Pairs | Stack:
        if name in self._lent:
            lent, text = self._lent[name]
            if is_idle(stack_of(lent)) and known_text(stack_of(lent)) == text:
                return lent
            stack_of(lent).stop()
        lent = start()
        self._lent[name] = lent, known_text(stack_of(lent))
        return lent


def stack_of(lent: Pairs | Stack) -> Stack:
    return lent.stack if isinstance(lent, Pairs) else lent


def is_idle(deployment: Stack) -> bool:
    try:
        deployment.wait_ready()
        for worker in deployment.workers:
            until("an idle engine", lambda worker=worker: worker.busy() == 0)  # type: ignore[misc]
    except (AssertionError, httpx.HTTPError):
        return False
    return True


def known_text(deployment: Stack) -> str:
    """The answer to a prompt too short for any cache; nothing where there is none."""
    try:
        return complete(deployment, [900, 901, 902], 12).text
    except (AssertionError, httpx.HTTPError):
        return ""


def live_check(deployment: Stack) -> list[dict[str, Any]]:
    """The steps of `check --live`, of which none may fail."""
    done = subprocess.run(
        [*COMMAND, "check", "--live", deployment.url, "--json", "--strict"],
        env=deployment.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    steps: list[dict[str, Any]] = json.loads(done.stdout)
    return steps


def assert_events_reach_the_router(deployment: Stack) -> None:
    """A router with KV events knows only the caches that events reported."""
    outcomes = {step["name"]: step["outcome"] for step in live_check(deployment)}
    assert (outcomes["kv event"], outcomes["prefix cache"]) == ("ok", "ok"), outcomes
