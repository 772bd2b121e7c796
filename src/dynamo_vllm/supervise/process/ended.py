"""Describes for a person how a process ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.config.planes import BUSY_FOLDER
from dynamo_vllm.supervise.process import logs

if TYPE_CHECKING:
    from pathlib import Path

ON_ORDER = "was stopped"
"""The reason of an end that an operator asked for."""
_CODES = {2: " (bad settings)", 3: " (the engine died)"}


@dataclass(frozen=True, slots=True)
class EndedProcess:
    """One run of a process, when it is over."""

    reason: str
    was_ready: bool
    ready_seconds: float
    code: int | None
    log: str
    """What this run wrote to its log."""

    @property
    def error(self) -> str | None:
        """The reason that it gave itself in its log."""
        return logs.error_line(self.log)

    @property
    def found_discovery_busy(self) -> bool:
        """Whether too many processes read and wrote the discovery folder at once, which passes."""
        return BUSY_FOLDER in self.log

    def describe_failure(self, name: str, log: Path) -> str:
        """Describe a failure; bad settings need only their one line, others also the end of the log."""
        error = self.error
        lines = [f"error: {name} {self.reason}" + (f": {error}" if error else "")]
        if error is None or self.code != 2:
            lines += [f"  | {line}" for line in logs.last_lines(self.log)]
        return "\n".join([*lines, f"  log: {log}"])


def describe(code: int) -> str:
    """Describe an exit status in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}{_CODES.get(code, '')}"
