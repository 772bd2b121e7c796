"""Shows the progress of a stage: one overwritten line on a terminal, a new line every 5 s elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynamo_vllm.bench.load.messages import StageProgress

EVERY_SECONDS = 5.0
_CLEAR = "\r\x1b[2K"


class Progress(Protocol):
    """Shows how far a load is."""

    def begin(self, name: str) -> None:
        """A stage begins."""

    def answered(self, first_token_seconds: Sequence[float]) -> None:
        """Some requests were answered, after these times to their first tokens."""

    def show(self, parts: Iterable[StageProgress]) -> None:
        """The client processes have come so far; called often."""

    def complete(self, parts: Iterable[StageProgress]) -> None:
        """The stage is over."""

    def say(self, text: str) -> None:
        """Tell something else."""

    def end(self) -> None:
        """Nothing follows, or something that is no progress."""


class ProgressLine:
    """The progress line of the running stage; implements `Progress`."""

    def __init__(self, stream: TextIO | None) -> None:
        """Without a stream nothing is shown."""
        self._stream = stream
        self._live = stream is not None and stream.isatty()
        self._name = ""
        self._begun = self._said = 0.0

    def begin(self, name: str) -> None:
        self._name = name
        self._begun = self._said = time.monotonic()

    def answered(self, first_token_seconds: Sequence[float]) -> None:
        """The line has no place for them."""

    def complete(self, parts: Iterable[StageProgress]) -> None:
        """The table follows."""

    def show(self, parts: Iterable[StageProgress]) -> None:
        """Show the sum over all client processes."""
        now = time.monotonic()
        if self._stream is None or (not self._live and now - self._said < EVERY_SECONDS):
            return
        self._said = now
        seen = list(parts)
        seconds = now - self._begun
        ok, failed = sum(p.ok for p in seen), sum(p.failed for p in seen)
        text = (
            f"{self._name}: {seconds:.0f} s, {ok} ok, {failed} failed, "
            f"{sum(p.in_flight for p in seen)} in flight, {sum(p.tokens for p in seen) / seconds:.0f} tok/s"
        )
        if self._live:
            self._write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
        else:
            self._write(text + "\n")

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self.end()
        self._write(text + "\n")

    def end(self) -> None:
        """Clear the line, so that other output can follow."""
        if self._live:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):  # the reader has gone; the load continues
                self._stream.write(text)
                self._stream.flush()
