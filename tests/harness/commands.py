"""Runs a command of ours to its end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from harness.processes import COMMAND


def run(
    env: Mapping[str, str] | None, *words: str, seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Without `env` the command has this process's."""
    return subprocess.run([*COMMAND, *words], env=env, capture_output=True, text=True, timeout=seconds)


def output(env: Mapping[str, str] | None, *words: str, seconds: float = 60.0) -> str:
    """Return what a command prints that must not fail."""
    done = run(env, *words, seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
