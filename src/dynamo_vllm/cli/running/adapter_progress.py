"""Shows the progress of adapters that workers load, on one line of a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from typing import TYPE_CHECKING, Any, TextIO

from dynamo_vllm.observe.units import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.serving.admin.client import Workers

EVERY_SECONDS = 0.3
FETCHING = "fetching"
"""The state in which a worker downloads an adapter."""
_CLEAR = "\r\x1b[2K"


async def show(
    workers: Workers,
    adapter: str,
    asked: Mapping[int, asyncio.Future[Any]],
    names: Mapping[int, str],
    stream: TextIO,
) -> None:
    """Show the progress until every worker has answered, if `stream` is a terminal."""
    if not stream.isatty():
        return
    try:
        while pending := [instance for instance, reply in asked.items() if not reply.done()]:
            await asyncio.wait([asked[instance] for instance in pending], timeout=EVERY_SECONDS)
            replies = await asyncio.gather(*(workers.ask(i, "list_loras", None, 2.0) for i in pending))
            states = {names[i]: state_of(reply, adapter) for i, reply in zip(pending, replies, strict=True)}
            _write(stream, _CLEAR + line(adapter, states, shutil.get_terminal_size().columns - 1))
    finally:
        _write(stream, _CLEAR)


def line(adapter: str, states: Mapping[str, str], columns: int) -> str:
    text = f"{adapter}: " + ", ".join(f"{name} {state}" for name, state in states.items())
    return text[:columns]


def state_of(reply: Mapping[str, Any], adapter: str) -> str:
    entries = [entry for entry in reply.get("loras", ()) if entry.get("name") == adapter]
    return progress(entries[0]) if entries else "waiting"


def progress(entry: Mapping[str, Any]) -> str:
    """Return the state of an adapter, with its bytes during a download and the reason of a failure."""
    state, done, total = str(entry.get("state", "?")), entry.get("done_bytes"), entry.get("total_bytes")
    if entry.get("error"):
        return f"{state}: {entry['error']}"
    if not done or state != FETCHING:
        return state
    if not total:
        return f"{state} {size(done)}"
    return f"{state} {size(done)} of {size(total)} ({100 * done / total:.0f} %)"


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader has gone; the load continues
        stream.write(text)
        stream.flush()
