"""Waiting for a condition with a deadline and a word about what was awaited."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NotInTime(AssertionError):
    """What was awaited did not come."""


def until(what: str, condition: Callable[[], T], seconds: float = 60.0, every: float = 0.02) -> T:
    """The first true value of `condition`; fails with `what` when the time is up.

    The time bounds a hang and nothing else: machines lose whole seconds to others.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise NotInTime(f"waited {seconds} s in vain for: {what}")
        time.sleep(every)


async def until_async(what: str, condition: Callable[[], T], seconds: float = 60.0, every: float = 0.01) -> T:
    """The same while the event loop goes on."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise NotInTime(f"waited {seconds} s in vain for: {what}")
        await asyncio.sleep(every)
    return value


def until_spread(ask: Callable[[int], T], who: Callable[[T], object], least: int = 6) -> list[T]:
    """Answers to the prompts 0, 1, 2 … until two workers have given them, at least so many.

    Between idle workers the router tosses a coin, which may fall on one side many times in a row.
    """
    answers: list[T] = []
    while len(answers) < least or len({who(answer) for answer in answers}) < 2:
        assert len(answers) < 24, "load should have spread them over both"
        answers.append(ask(len(answers)))
    return answers


class Promptness:
    """How long the same thing takes, several times: one may be late, most may not.

    Beside each stands how long it takes to look, at the same time on the same machine: where the machine is
    slow, both are.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.looks: list[float] = []

    def until(self, what: str, condition: Callable[[], object]) -> None:
        began = time.monotonic()
        until(what, condition)
        done = time.monotonic()
        condition()
        self.seconds.append(done - began)
        self.looks.append(time.monotonic() - done)

    def assert_within(self, seconds: float) -> None:
        """Or within twenty looks, where those take longer."""
        limit = max(seconds, 20 * statistics.median(self.looks))
        assert statistics.median(self.seconds) < limit, (self.seconds, self.looks)
