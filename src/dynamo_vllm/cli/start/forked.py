"""Sets up a worker process that `serve` forked, and runs `dynamo-vllm worker` in it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dynamo_vllm.cli import main
from dynamo_vllm.engine.process import preload

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKER = "dynamo_vllm.cli.start.worker"


def run(fds: Sequence[int], argv: Sequence[str]) -> int:
    """Run a worker whose log and status pipe are these file descriptors."""
    log, status = fds
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    words = [*argv, "--status-fd", str(status)]
    sys.argv = ["dynamo-vllm", "worker", *words]
    preload.name_process(" ".join(sys.argv))
    return main.run_command(WORKER, words)
