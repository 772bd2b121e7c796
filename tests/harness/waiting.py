"""Waiting for a condition with a deadline and a word about what was awaited."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(what: str, condition: Callable[[], T], seconds: float = 30.0, every: float = 0.02) -> T:
    """The first true value of `condition`; fails with `what` when the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain for: {what}")
        time.sleep(every)


def joined(what: str, condition: Callable[[], T], seconds: float = 30.0) -> T:
    """`until` for a condition that asks: the frontend says 503 for a moment while a worker joins."""
    import openai  # 0.8 s, which other waits need not pay

    def answered() -> T | None:
        try:
            return condition()
        except openai.InternalServerError as error:
            if error.status_code != 503:
                raise
            return None

    found = until(what, answered, seconds)
    assert found is not None
    return found


class Promptness:
    """How long the same thing takes, several times: on a busy machine one may be late, most may not."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def until(self, what: str, condition: Callable[[], object]) -> None:
        began = time.monotonic()
        until(what, condition)
        self.seconds.append(time.monotonic() - began)

    def assert_within(self, seconds: float) -> None:
        assert statistics.median(self.seconds) < seconds, [round(value, 2) for value in self.seconds]
