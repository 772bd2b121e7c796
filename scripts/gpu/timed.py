"""The `dynamo-vllm` command with the stages of a request about pictures timed.

    STAGE_TIMES=FILE python scripts/gpu/timed.py worker … --worker-extension-cls timed_encoder.Timed

Every stage adds a line to the file: its name and its seconds. The vision encoder runs in the engine's
process; the extension times it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

FETCH, PROCESS, ENCODE, ASK, READ = "fetch", "process", "encode", "ask", "read"
TIMES = "STAGE_TIMES"


def note(stage: str, seconds: float) -> None:
    with open(os.environ[TIMES], "a") as file:  # one short write: lines of two processes do not mix
        file.write(f"{stage} {seconds:.6f}\n")


def timed(stage: str, does: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(does)
    async def noted(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        done = await does(*args, **kwargs)
        note(stage, time.perf_counter() - began)
        return done

    return noted


def main() -> None:
    from dynamo_vllm.cli.main import main as command

    if sys.argv[1:2] == ["worker"]:
        time_stages()
    command()


def time_stages() -> None:
    from dynamo_vllm.engine.vllm.parts.encoded import EncodedFolder
    from dynamo_vllm.roles.media import MediaReader
    from dynamo_vllm.serving.encoding.encode_workers import EncodeWorkers

    for owner, name, stage in (
        (MediaReader, "load", FETCH),
        (MediaReader, "see", PROCESS),
        (EncodeWorkers, "encode", ASK),
        (EncodedFolder, "read", READ),
    ):
        setattr(owner, name, timed(stage, getattr(owner, name)))


if __name__ == "__main__":
    main()
