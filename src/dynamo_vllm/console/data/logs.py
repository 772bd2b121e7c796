"""Reads the logs of a `serve` by pages: only files of its folder, by name, and only so much at once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import private
from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.observe.frontend_client import harmless

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    _Line = tuple[int, str, str | None]
    """Where it begins, its text, and its own level."""

MOST_LINES = 2000
MOST_BYTES = 4 << 20
"""Read for one answer; a filter that finds nothing there goes on with the next."""
LINE_CHARACTERS = 4000
_STEP_BYTES = 1 << 16
_NAME = re.compile(r"[\w.-]+\.log(\.\d+)?")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# "2026-11-15T05:15:28.123Z  WARN name: …" is ours and the runtime's, "(EngineCore pid=1) ERROR 11-15" vLLM's.
_LEVEL = re.compile(
    r"^(?:\(\w+ pid=\d+\) ?)?(?:\S+Z\s+)?(TRACE|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)\b|^(error): ",
    re.IGNORECASE,
)
LEVELS = {"TRACE": 0, "DEBUG": 1, "INFO": 2, "WARN": 3, "WARNING": 3, "ERROR": 4, "CRITICAL": 4}


@dataclass(frozen=True, slots=True)
class LogQuery:
    before: int | None = None
    """Read backwards from this byte; None with no `after` reads from the end."""
    after: int | None = None
    """Read forwards from this byte."""
    limit: int = 500
    level: str | None = None
    """The least level."""
    text: str | None = None
    """What a line must contain, in any case."""


class Logs:
    """The logs in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def listed(self) -> list[dict[str, Any]]:
        found = []
        for path in self._files():
            about = path.stat(follow_symlinks=False)
            found.append({"name": path.name, "bytes": about.st_size, "changed": round(about.st_mtime, 3)})
        return sorted(found, key=lambda one: str(one["name"]))

    def _files(self) -> Iterator[Path]:
        if self._folder is None:
            return
        try:
            entries = list(self._folder.iterdir())
        except OSError:
            return
        for path in entries:
            if _NAME.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                yield path

    def lines(self, name: str, query: LogQuery) -> dict[str, Any]:
        """Return a page of one log; `name` may lack its ending."""
        path = next((one for one in self._files() if one.name in (name, f"{name}.log")), None)
        if path is None:
            raise ConsoleError(404, f"there is no log {name!r}", "choose one of the list")
        level = (query.level or "").upper()
        if level and level not in LEVELS:
            raise ConsoleError(400, f"level {query.level!r} is unknown", f"choose from {', '.join(LEVELS)}")
        fits = _Filter(LEVELS.get(level, 0), (query.text or "").casefold())
        try:
            with open(private.open_file(path, os.O_RDONLY), "rb") as log:
                size = os.fstat(log.fileno()).st_size
                limit = min(query.limit, MOST_LINES)
                if query.after is not None:
                    return _forwards(log, min(query.after, size), size, limit, fits)
                end = size if query.before is None else min(query.before, size)
                return _backwards(log, end, limit, fits)
        except OSError as exc:
            raise ConsoleError(404, f"log {name!r} cannot be read: {exc.strerror}") from None


class _Filter:
    """Chooses lines; one without a level belongs to the line above it, as that of a traceback does."""

    def __init__(self, least: int, text: str) -> None:
        self._least = least
        self._text = text

    def chosen(self, lines: Iterable[_Line]) -> list[dict[str, Any]]:
        found = []
        level: str | None = None
        for at, text, own in lines:
            level = own or level
            if self.has_level(level) and self.has_text(text):
                found.append({"at_byte": at, "text": text, "level": level and _word(level)})
        return found

    def has_level(self, level: str | None) -> bool:
        return LEVELS.get(level or "INFO", 2) >= self._least

    def has_text(self, text: str) -> bool:
        return self._text in text.casefold()


def _word(level: str) -> str:
    return {"WARN": "warning", "CRITICAL": "error"}.get(level, level.lower())


def _forwards(log: Any, start: int, size: int, limit: int, fits: _Filter) -> dict[str, Any]:
    end = min(size, start + MOST_BYTES)
    log.seek(start)
    data = log.read(end - start)
    whole = len(data) if len(data) >= MOST_BYTES and b"\n" not in data else data.rfind(b"\n") + 1
    found = fits.chosen(_split(data[:whole], start))
    if len(found) > limit:
        found = found[:limit]
        after = found[-1]["at_byte"]
        past = data.find(b"\n", after - start)
        whole = len(data) if past < 0 else past + 1
    return {"lines": found, "from_byte": start, "to_byte": start + whole}


def _backwards(log: Any, end: int, limit: int, fits: _Filter) -> dict[str, Any]:
    """Read steps until there are enough lines; each line is looked at when its step is read."""
    start = begin = end
    rest: list[bytes] = []
    """What was read above `begin`, the last step first: the end of a line."""
    found: list[dict[str, Any]] = []
    waiting: list[_Line] = []
    """Lines at the top, whose level is that of a line that is still to be read."""
    levelled = None
    """Where the line with a level begins that is highest."""
    shown = 0
    while start > 0 and end - start < MOST_BYTES and shown < limit:
        step = min(_STEP_BYTES, start)
        start -= step
        log.seek(start)
        data = log.read(step)
        # The first line of what was read is the end of one, unless the log begins there.
        head = 0 if start == 0 else data.find(b"\n") + 1
        if start > 0 and head == 0:
            rest.append(data)
            continue
        begin = start + head
        lines = _split(b"".join([data[head:], *reversed(rest)]), begin)
        rest = [data[:head]]
        top = next((number for number, line in enumerate(lines) if line[2]), len(lines))
        if top < len(lines):
            found = fits.chosen([*lines[top:], *waiting]) + found
            waiting, levelled = [], lines[top][0]
        waiting = [line for line in lines[:top] if fits.has_text(line[1])] + waiting
        shown = len(found) + (len(waiting) if fits.has_level(None) else 0)
    if begin == end:  # one line fills all of it: show this part
        begin = start
        found = fits.chosen(_split(b"".join(reversed(rest)), start))
    elif fits.has_level(None):
        found = fits.chosen(waiting) + found
    elif waiting and start > 0 and levelled is not None:
        begin = levelled  # the next page reads what they belong to
    if len(found) > limit:
        found = found[-limit:]
        begin = found[0]["at_byte"]
    return {"lines": found, "from_byte": begin, "to_byte": end}


def _split(data: bytes, start: int) -> list[_Line]:
    found = []
    at = start
    for line in data.split(b"\n"):
        if line:
            text = harmless(_COLOURS.sub("", line.decode(errors="replace").rstrip("\r")))[:LINE_CHARACTERS]
            level = _LEVEL.match(text)
            found.append((at, text, (level[1] or level[2]).upper() if level else None))
        at += len(line) + 1
    return found
