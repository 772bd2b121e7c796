"""A child process whose pid stays reserved until it is released.

Once a process has ended and was waited for, its pid and group id may be reused, and a signal to the rest of
the group would hit strangers. So we notice the exit at once, but wait for the process only at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

LOOK_SECONDS = 0.05
"""Used if the kernel cannot tell (Linux before 5.3)."""


class Held:
    """A child by its pid; implements `child.RunningProcess`."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._popen = popen  # subprocess waits for those that nobody keeps
        self._is_released = False
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            self._poll()
        else:
            self._loop.add_reader(fd, self._on_exit, fd)

    def _on_exit(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        os.close(fd)
        self._check_exit()

    def _poll(self) -> None:
        self._check_exit()
        if self.returncode is None:
            self._loop.call_later(LOOK_SECONDS, self._poll)

    def _check_exit(self) -> None:
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return
        self.returncode = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self._ended.set()
        if self._is_released:
            self._reap()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def release(self) -> None:
        """From its end on the pid may be reused."""
        if not self._is_released:
            self._is_released = True
            if self.returncode is not None:
                self._reap()

    def _reap(self) -> None:
        if self._popen is not None:
            self._popen.wait()
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
