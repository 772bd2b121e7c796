"""Starts a real engine whose copies to the host tier end only when a test lets them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

CALL = "cpu.slow_copies:run_command"
"""For `Zygote.start_worker`: the engine core is forked from the worker, and so has these changes."""
HOLD = "TEST_HOLD_COPIES"
"""The variable with the path of a file: while it exists, no copy ends."""


def run_command(module: str, argv: Sequence[str]) -> int:
    from dynamo_vllm.cli import main
    from dynamo_vllm.engine.tiers.host_copies import HostCopies

    finished = HostCopies.get_finished

    def held(self: Any) -> Any:
        return [] if os.path.exists(os.environ[HOLD]) else finished(self)

    HostCopies.get_finished = held  # type: ignore[method-assign]
    return main.run_command(module, argv)
