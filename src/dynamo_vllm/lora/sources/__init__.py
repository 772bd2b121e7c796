"""Downloads an adapter's files to this machine: one module per scheme, one table.

A source blocks, in another thread; it reports progress through `report`, which raises `Stopped` once nobody
waits any more. Failures outside are a SourceFailed without credentials in its text.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from dynamo_vllm.errors import BadCommand
from dynamo_vllm.lora.sources import hub, local, s3
from dynamo_vllm.lora.sources.base import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path

    from dynamo_vllm.lora.base import Fetched, OnProgress
    from dynamo_vllm.lora.sources.base import SourceLimits


SOURCES: dict[str, Callable[[str, Path, SourceLimits, OnProgress], Fetched]] = {
    "": local.fetch,
    "file": local.fetch,
    "hf": hub.fetch,
    "s3": s3.fetch,
}
KNOWN = "/folder, file:///folder, hf://owner/name[@revision], s3://bucket/prefix"


async def fetch(
    uri: str, cache: Path, limits: SourceLimits, on_progress: OnProgress, threads: Executor | None = None
) -> Fetched:
    """Download the files. Raises BadCommand, SourceFailed, AdapterRefused. A thread calls `on_progress`."""
    source = _choose(uri)
    stop = threading.Event()

    def report(done: int, total: int | None) -> None:
        if stop.is_set():
            raise Stopped
        on_progress(done, total)

    try:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, source, uri, cache, limits, report)
    finally:
        stop.set()  # a cancelled caller does not wait; the thread ends at its next report


def _choose(uri: str) -> Callable[[str, Path, SourceLimits, OnProgress], Fetched]:
    scheme, mark, _ = uri.partition("://")
    if mark and scheme not in SOURCES:
        raise BadCommand(f"{scheme[:20]}:// is unknown; give one of {KNOWN}")
    if not mark and not uri.startswith("/"):
        raise BadCommand(f"{uri[:200]!r} is neither an absolute path nor an address; give one of {KNOWN}")
    return SOURCES[scheme if mark else ""]
