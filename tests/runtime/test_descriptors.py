"""Watches of the kernel that are used up, in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.processes import COMMAND, free_port
from harness.stack import environment
from runtime.conftest import fake


@pytest.mark.parametrize(("process", "left"), [("frontend", 8), ("worker", 3)])
def test_watches_of_the_kernel_that_are_used_up_are_named(
    process: str, left: int, model: Path, tmp_path: Path
) -> None:
    """In a user namespace, which has a limit of its own."""
    limit = "/proc/sys/user/max_inotify_instances"
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", f'echo {left} > {limit} && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    words = {
        "frontend": ("--port", str(free_port())),
        "worker": fake(model),
    }
    done = subprocess.run(
        [*inside, *COMMAND, process, *words[process]],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"inotify instances, and this user has {left} left" in line
    assert "sysctl -w fs.inotify.max_user_instances=1024" in line
