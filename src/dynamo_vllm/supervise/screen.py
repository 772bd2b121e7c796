"""Shows the progress of the start: live rows on a terminal, one line per change elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

_UP, _CLEAR = "\x1b[{}A", "\x1b[2K"
SETTLED = ("ready", "stopped", "failed")


@dataclass(slots=True)
class Row:
    """One process on a terminal."""

    phase: str
    started_at: float
    settled_after: float | None = None

    def text(self, name: str, width: int, now: float) -> str:
        seconds = now - self.started_at if self.settled_after is None else self.settled_after
        return f"  {name:<{width}}  {self.phase:<12} {seconds:6.1f} s"


class Screen:
    """Progress goes to `err`, the one line that programs wait for to `out`."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._live = err.isatty()
        self._rows: dict[str, Row] = {}
        self._drawn = 0

    def phase(self, name: str, phase: str) -> None:
        now = time.monotonic()
        row = self._rows.get(name)
        if row is None or phase == "starting":
            row = self._rows[name] = Row(phase, now)
        elif row.phase == phase:
            return
        row.phase = phase
        row.settled_after = now - row.started_at if phase in SETTLED else None
        if self._live:
            self.redraw()
        else:
            self._line(f"{name}: {phase} ({now - row.started_at:.1f} s)")

    def remove(self, name: str) -> None:
        """Forget a process that is gone for good."""
        self._rows.pop(name, None)

    def say(self, text: str) -> None:
        """Write one line, above the rows if there are any."""
        self._erase()
        self._line(text)
        self.redraw()

    def announce(self, text: str) -> None:
        """Write the line on `out`; after it there are no live rows."""
        self.redraw()
        self.settle()
        _write(self._out, text + "\n")

    def hint(self, lines: Sequence[str]) -> None:
        """Write for a person, below the announced line."""
        _write(self._err, "".join(f"  {line}\n" for line in lines))

    def settle(self) -> None:
        """Leave the rows as they are and write lines below them."""
        self._live = False
        self._drawn = 0

    def redraw(self) -> None:
        """Also called now and then to update the seconds."""
        if not self._live or not self._rows:
            return
        now, width = time.monotonic(), max(map(len, self._rows))
        columns = shutil.get_terminal_size().columns - 1  # a wrapped row would break the redraw
        up = _UP.format(self._drawn) if self._drawn else ""
        rows = (_CLEAR + row.text(name, width, now)[:columns] + "\n" for name, row in self._rows.items())
        _write(self._err, up + "".join(rows))
        self._drawn = len(self._rows)

    def _erase(self) -> None:
        if self._drawn:
            _write(self._err, _UP.format(self._drawn) + "\x1b[J")
            self._drawn = 0

    def _line(self, text: str) -> None:
        stamp = "" if self._live or text.startswith("error: ") else time.strftime("%H:%M:%S ")
        _write(self._err, f"{stamp}{text}\n")


def _write(stream: TextIO, text: str) -> None:
    """A closed output must not end the deployment."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()
