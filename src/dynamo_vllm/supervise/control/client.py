"""Asks a running `serve` over its control socket, for commands and for other processes of this user."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import StartError
from dynamo_vllm.supervise.control.messages import MAX_LINE_BYTES, ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

CONNECT_SECONDS = 5.0
_LIMIT_BYTES = 64 * MAX_LINE_BYTES


async def ask(
    socket: Path,
    request: Mapping[str, object],
    on_progress: Callable[[dict[str, Any]], None] = lambda progress: None,
    answer_seconds: float | None = None,
) -> dict[str, Any]:
    """Return the result of a request, such as `{"verb": "restart", "name": "worker-1"}`.

    Raises ControlError with serve's reason, StartError if serve does not answer. Without `answer_seconds` it
    waits as long as serve works on it. A caller that is cancelled does not stop what it has asked for.
    """
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_unix_connection(socket, limit=_LIMIT_BYTES)
    except (OSError, TimeoutError) as exc:
        raise StartError(f"serve does not answer on {socket}: {exc or 'no connection'}") from None
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        async with asyncio.timeout(answer_seconds):
            while line := await reader.readline():
                message = json.loads(line)
                if "progress" in message:
                    on_progress(message["progress"])
                elif "error" in message:
                    raise ControlError(message["error"]["kind"], message["error"]["message"])
                else:
                    result: dict[str, Any] = message["result"]
                    return result
    except TimeoutError:
        raise StartError(
            f"serve has not answered within {answer_seconds:.0f} s; it may still do it"
        ) from None
    except (OSError, ValueError) as exc:
        raise StartError(f"serve ended the connection: {exc}") from None
    finally:
        writer.close()
    raise StartError("serve ended before it had answered; see its logs")
