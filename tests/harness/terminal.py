"""A command on a terminal: what a person would see, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.waiting import until


@dataclass
class Terminal:
    process: subprocess.Popen[bytes]
    _seen: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything that was written so far."""
        return b"".join(self._seen).decode(errors="replace")

    def wait_for(self, words: str, times: int = 1) -> None:
        until(f"{words!r} in {self.text!r}", lambda: self.text.count(words) >= times)

    def read(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(fd, 4096):
                self._seen.append(data)


@contextlib.contextmanager
def terminal(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(command, env=dict(env), stdin=theirs, stdout=theirs, stderr=theirs)
    finally:
        os.close(theirs)
    made = Terminal(process)
    reader = threading.Thread(target=made.read, args=(ours,))
    reader.start()
    try:
        yield made
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(ours)
