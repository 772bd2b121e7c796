"""Repeats a display at an interval: in place on a terminal, one after the other elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


async def watch(
    look: Callable[[], Awaitable[str]],
    show: Callable[[str], None],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Call `look` once per interval until cancelled; a slow call skips intervals."""
    due = clock()
    while True:
        show(await look())
        due = max(due + seconds, clock())
        await sleep(due - clock())


class WatchScreen:
    """The terminal or stream of the display. The context restores the terminal at its end."""

    def __init__(self, stream: TextIO, *, is_live: bool) -> None:
        self._stream = stream
        self._is_live = is_live
        self._last = ""

    def __enter__(self) -> Self:
        if self._is_live:
            self._write(_ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last display on the terminal."""
        if self._is_live:
            self._write(_LEAVE + self._last)

    def show(self, text: str) -> None:
        self._last = text + "\n"
        self._write(frame(text, *shutil.get_terminal_size()) if self._is_live else self._last)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def frame(text: str, columns: int, lines: int) -> str:
    """Return the text that overwrites the last display. It clears nothing first, so nothing flickers."""
    rows = text.splitlines()
    if len(rows) > lines:
        rows = [*rows[: lines - 1], f"… {len(rows) - lines + 1} more lines"]
    rows = [row[: columns - 1] for row in rows]  # a full row would wrap
    return _HOME + "\r\n".join(row + _REST_OF_LINE for row in rows) + _REST_OF_SCREEN
