"""How patient the supervisor is, and the two judgements that follow from it: pure, told the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Every number the supervisor goes by."""

    start_seconds: float = 600.0
    """From a process' start until it says that it is ready."""
    restarts: int = 10
    """Replacements of one process in a row."""
    retry_seconds: float = 600.0
    """After them a worker rests for this long."""
    healthy_seconds: float = 60.0
    """Ready for this long, a process that ends begins a new row."""
    max_pause_seconds: float = 30.0
    look_seconds: float = 2.0
    """Between two looks at a process' health."""
    answer_seconds: float = 5.0
    """For the answer to a look."""
    hang_seconds: float = 30.0
    """Without any answer, the process is replaced."""
    unwell_seconds: float = 120.0
    """Answering that it is not ready, the process is replaced."""
    log_bytes: int = 50 << 20
    """Of one log before it is put aside; 0 lets it grow."""
    log_parts: int = 3
    """Older parts of each log that stay."""
    first_answer_seconds: float = 120.0
    """For the request that proves that all is well."""
    stop_seconds: float = 10.0
    """For leaving, beside the time requests get to finish."""


class Restarts:
    """Decides when an ended process is started again."""

    def __init__(self, limits: SupervisorLimits) -> None:
        self._limits = limits
        self.in_a_row = 0

    def pause_after(self, ready_seconds: float) -> float | None:
        """Seconds until the next start of a process that was ready for so long; None when it is enough."""
        if ready_seconds >= self._limits.healthy_seconds:
            self.in_a_row = 0
        if self.in_a_row >= self._limits.restarts:
            return None
        self.in_a_row += 1
        if self.in_a_row == 1:  # most often somebody's kill, or the machine's; whoever waits should not
            return 0.0
        return min(2.0 ** (self.in_a_row - 2), self._limits.max_pause_seconds)


class Pulse:
    """Judges a process that was ready by the answers of its health server."""

    def __init__(self, limits: SupervisorLimits, now: float) -> None:
        self._limits = limits
        self._answered_at = now
        self._well_at = now

    def verdict(self, status: int | None, now: float) -> str | None:
        """Why the process must be replaced; None while it need not. `status` is None for no answer."""
        if status is not None:
            self._answered_at = now
            if status < 400:
                self._well_at = now
        if now - self._answered_at > self._limits.hang_seconds:
            return f"did not answer for {now - self._answered_at:.0f} s"
        if now - self._well_at > self._limits.unwell_seconds:
            return f"was not ready for {now - self._well_at:.0f} s"
        return None
