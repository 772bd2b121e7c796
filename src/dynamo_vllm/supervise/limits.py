"""The supervisor's time limits and the two decisions based on them. Pure: it is given the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Every number that the supervisor uses."""

    start_seconds: float = 600.0
    """From the start of a process until it is ready."""
    restarts: int = 10
    """Restarts of one process in a row."""
    retry_seconds: float = 600.0
    """Pause of a worker after that many restarts."""
    healthy_seconds: float = 60.0
    """A process that was ready for this long starts a new row when it ends."""
    max_pause_seconds: float = 30.0
    look_seconds: float = 2.0
    """Between two health checks of a process."""
    answer_seconds: float = 5.0
    """The least time that a process has for the answer to a health check."""
    hang_seconds: float = 30.0
    """Without any answer for this long, the process is replaced."""
    unwell_seconds: float = 120.0
    """Not ready for this long, the process is replaced."""
    log_bytes: int = 50 << 20
    """Size at which a log is rotated; 0 lets it grow."""
    log_parts: int = 3
    """Rotated parts to keep of each log."""
    first_answer_seconds: float = 120.0
    """For the request that proves that the deployment works."""
    stop_seconds: float = 10.0
    """For stopping, besides the time for running requests."""


class Restarts:
    """Decides when an ended process is started again."""

    def __init__(self, limits: SupervisorLimits) -> None:
        self._limits = limits
        self.in_a_row = 0

    def pause_after(self, ready_seconds: float) -> float | None:
        """Return the seconds until the next start of a process that was ready for so long; None to
        give up.
        """
        if ready_seconds >= self._limits.healthy_seconds:
            self.in_a_row = 0
        if self.in_a_row >= self._limits.restarts:
            return None
        self.in_a_row += 1
        if self.in_a_row == 1:  # most often a kill by a user or the system; clients should not wait
            return 0.0
        return min(2.0 ** (self.in_a_row - 2), self._limits.max_pause_seconds)


class Pulse:
    """Judges a ready process by the answers of its health server.

    A slow process is not hung: an answer may take as long as the process may be silent. And if the supervisor
    itself did not run for a while, as on a machine that was suspended, it asks once more.
    """

    def __init__(self, limits: SupervisorLimits, now: float) -> None:
        self._limits = limits
        self._answered_at = now
        self._well_at = now

    def patience(self, now: float) -> float:
        """Return the seconds that the answer to a check may take which begins now."""
        return max(self._answered_at + self._limits.hang_seconds - now, self._limits.answer_seconds)

    def verdict(self, status: int | None, asked_at: float, now: float) -> str | None:
        """Return why the process must be replaced, or None. `status` is None for no answer."""
        was_held_up = now - asked_at > self.patience(asked_at) + self._limits.answer_seconds
        if status is not None:
            self._answered_at = now
            if status < 400:
                self._well_at = now
        elif now - self._answered_at >= self._limits.hang_seconds and not was_held_up:
            return f"did not answer for {now - self._answered_at:.0f} s"
        if status is not None and now - self._well_at > self._limits.unwell_seconds:
            return f"was not ready for {now - self._well_at:.0f} s"
        return None
