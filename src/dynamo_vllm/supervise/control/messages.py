"""Defines what goes over the control socket of `serve`: one JSON line in, JSON lines out.

A client sends one request. It gets `{"progress": {…}}` as often as something changes, and at last
`{"result": {…}}` or `{"error": {"kind": …, "message": …}}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from dynamo_vllm.errors import DynamoVllmError

MAX_LINE_BYTES = 64 * 1024
MOST_WORKERS = 256
"""Of one group; more are a slip of the keyboard."""
BAD_REQUEST, UNKNOWN, BUSY, REFUSED, FAILED = "bad_request", "unknown", "busy", "refused", "failed"
"""Kinds of errors: `refused` changed nothing, `failed` happened on the way."""

Report = Callable[[dict[str, Any]], None]
"""Takes what a client is told on the way."""


class ControlError(DynamoVllmError):
    """The answer to a request that was not carried out; the text says what to do."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Request(msgspec.Struct, frozen=True, tag_field="verb", forbid_unknown_fields=True):
    pass


class Processes(_Request, frozen=True, tag="processes"):
    """List the processes and the groups of workers."""


class Restart(_Request, frozen=True, tag="restart"):
    """Stop a process as SIGTERM does and start it again."""

    name: str
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Drain(_Request, frozen=True, tag="drain"):
    """Stop a worker as SIGTERM does; it stays stopped until a restart."""

    name: str
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Scale(_Request, frozen=True, tag="scale"):
    """Change the number of workers of a group."""

    group: str
    workers: Annotated[int, msgspec.Meta(ge=0, le=MOST_WORKERS)]
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None


Request = Processes | Restart | Drain | Scale
_decoder = msgspec.json.Decoder(Request)


def decode(line: bytes) -> Request:
    """Return the request of a line; ControlError if it is none."""
    try:
        request: Request = _decoder.decode(line)
    except msgspec.DecodeError as exc:
        raise ControlError(
            BAD_REQUEST, f'{exc}; send one line such as {{"verb": "restart", "name": "worker-1"}}'
        ) from None
    return request


def encode(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message) + b"\n"
