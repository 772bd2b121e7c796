"""Waiting for a condition with a deadline and a word about what was awaited."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import openai

T = TypeVar("T")


def until(what: str, condition: Callable[[], T], seconds: float = 10.0, every: float = 0.02) -> T:
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
