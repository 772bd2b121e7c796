"""Reports the phases of the start to the parent process: one JSON line per phase."""

from __future__ import annotations

import json
import logging
import os
import time

logger = logging.getLogger(__name__)


class Progress:
    """The phases of a start, on a file descriptor if one was given, and always in the log."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._since = time.monotonic()
        self._last = ""

    def phase(self, name: str, **details: object) -> None:
        if name == self._last:
            return
        self._last = name
        elapsed = round(time.monotonic() - self._since, 1)
        logger.info("%s (%.1f s)%s", name, elapsed, "".join(f" {k}={v}" for k, v in details.items()))
        self._write({"phase": name, "elapsed": elapsed, **details})

    def _write(self, line: dict[str, object]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
        except OSError:  # nobody reads it any more
            self._fd = None
