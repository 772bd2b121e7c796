"""Starts a real engine that has its host memory, and then fails or waits for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CALL = "cpu.stopped_starts:run_command"
"""For `Zygote.start_worker`: the engine core is forked from the worker, and so has these changes."""
REACHED = "TEST_REACHED"
"""The variable with the path of a file that the engine makes when it is there."""
FAILS = "TEST_FAILS"


def run_command(module: str, argv: Sequence[str]) -> int:
    from dynamo_vllm.cli import main
    from dynamo_vllm.engine.tiers.spec import Tiers

    def stop(self: Any) -> None:
        Path(os.environ[REACHED]).touch()
        if FAILS in os.environ:
            raise RuntimeError("out of memory")
        while True:
            signal.pause()

    Tiers.get_manager = stop  # type: ignore[method-assign]
    return main.run_command(module, argv)
