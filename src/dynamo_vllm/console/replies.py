"""Reads requests of the page and answers them: JSON, and errors with what to do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

T = TypeVar("T")
JSON = "application/json"
BODY_BYTES = 64 << 10
BODY_SECONDS = 30.0
"""Of everything but requests to models."""


class ConsoleError(Exception):
    """A request that is not answered; the message and the fix are shown to the user."""

    def __init__(
        self, status: int, message: str, fix: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.fix = fix
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        return msgspec.json.encode({"error": {"message": self.message, "fix": self.fix}})


def reply(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def refused(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, ConsoleError)
    return Response(exc.body(), exc.status, exc.headers, JSON)


async def read_body(request: Request, limit: int = BODY_BYTES, seconds: float = BODY_SECONDS) -> bytes:
    """Return the body; raise for one that is longer than the limit, or does not come in time."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:18]) > limit:
        raise _too_long(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_long(limit)
                parts.append(part)
    except TimeoutError:
        raise ConsoleError(
            408, f"the request was not complete after {seconds:.0f} s", "send it again"
        ) from None
    except ClientDisconnect:
        raise ConsoleError(499, "the client has left before the request was complete") from None
    return b"".join(parts)


def _too_long(limit: int) -> ConsoleError:
    return ConsoleError(413, f"the request is longer than {limit >> 10} KiB", "send less at once")


async def decoded(request: Request, shape: type[T], limit: int = BODY_BYTES) -> T:
    """Return the body in its shape; raise for another one."""
    body = await read_body(request, limit)
    try:
        return msgspec.json.decode(body or b"{}", type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConsoleError(400, f"the request is not what this route takes: {exc}") from None
    except RecursionError:
        raise ConsoleError(400, "the request is nested too deeply") from None


def number(request: Request, name: str, default: float, least: float, most: float) -> float:
    """Return a number of the query; raise for one outside the range."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not least <= found <= most:
        raise ConsoleError(400, f"{name} must be a number from {least:g} to {most:g}")
    return found


def whole_number(request: Request, name: str, default: int, least: int, most: int) -> int:
    return int(number(request, name, default, least, most))
