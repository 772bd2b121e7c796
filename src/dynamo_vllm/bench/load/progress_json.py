"""Writes the progress of a load for other programs: a JSON object per second, each on a line of its own."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynamo_vllm.bench.load.messages import StageProgress

EVERY_SECONDS = 1.0
_STEP = math.log(1.02)
"""Times are counted in steps of 2 %, so that a load of any length takes the same memory."""


class ProgressJson:
    """The progress of the running stage; implements `progress_line.Progress`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stage, self._number = "", 0
        self._begun = self._said = 0.0
        self._tokens_said = 0
        self._first_tokens: Counter[int] = Counter()

    def begin(self, name: str) -> None:
        self._stage = name
        self._number += 1
        self._begun = self._said = time.monotonic()
        self._tokens_said = 0
        self._first_tokens.clear()

    def answered(self, first_token_seconds: Sequence[float]) -> None:
        self._first_tokens.update(
            math.floor(math.log(max(seconds, 1e-6)) / _STEP) for seconds in first_token_seconds
        )

    def show(self, parts: Iterable[StageProgress]) -> None:
        if time.monotonic() - self._said >= EVERY_SECONDS:
            self._write_figures(parts, has_ended=False)

    def complete(self, parts: Iterable[StageProgress]) -> None:
        self._write_figures(parts, has_ended=True)

    def say(self, text: str) -> None:
        self._write({"message": text})

    def end(self) -> None:
        """Leave nothing to clear."""

    def _write_figures(self, parts: Iterable[StageProgress], has_ended: bool) -> None:
        now, seen = time.monotonic(), list(parts)
        tokens = sum(part.tokens for part in seen)
        passed = now - self._said
        self._write(
            {
                "stage": self._stage,
                "number": self._number,
                "seconds": round(now - self._begun, 3),
                "ok": sum(part.ok for part in seen),
                "failed": sum(part.failed for part in seen),
                "in_flight": sum(part.in_flight for part in seen),
                "tokens": tokens,
                "tokens_per_second": round((tokens - self._tokens_said) / passed, 2) if passed > 0 else 0.0,
                "ttft_ms": {"p50": self._percentile(50), "p99": self._percentile(99)},
                "ended": has_ended,
            }
        )
        self._said, self._tokens_said = now, tokens

    def _percentile(self, percent: float) -> float | None:
        """Return a time to the first token in ms, the middle of its step; None before the first answer."""
        rank = math.ceil(self._first_tokens.total() * percent / 100)
        seen = 0
        for step in sorted(self._first_tokens):
            seen += self._first_tokens[step]
            if seen >= rank:
                return round(1000 * math.exp((step + 0.5) * _STEP), 3)
        return None

    def _write(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader has gone; the load continues
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()
