"""Reads requests of clients and passes them on to the frontend."""

from __future__ import annotations

import asyncio
import codecs
import errno
import logging
import sqlite3
import sys
import time
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from dynamo_vllm.gateway.database import DatabaseAway
from dynamo_vllm.gateway.identity import caller_of
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from starlette.requests import Request

    Handler = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger(__name__)
T = TypeVar("T")
BODY_BYTES = 45 << 20
"""The frontend takes no longer ones either."""
PIECE_BYTES = 1 << 20
QUIET_SECONDS = 60.0
DISK_FULL = "53100"
"""PostgreSQL's code."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
CONNECT_SECONDS = 10.0
FORWARDED = ("traceparent", "tracestate", "x-request-id")
JSON = "application/json"
_TIMEOUT = httpx.Timeout(None, connect=CONNECT_SECONDS)


class _Fault(msgspec.Struct):
    """An error of the frontend, or one that has the shape of OpenAI's already."""

    message: str | None = None
    error: dict[str, Any] | str | None = None


def answered(handler: Handler) -> Handler:
    """Turn refusals into answers."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except GatewayError as exc:
            return refusal_reply(exc)
        except Exception as exc:
            if (refusal := storage_refusal(exc)) is None:
                raise
            return refusal_reply(refusal)

    return handle


def refusal_reply(exc: GatewayError) -> Response:
    return Response(exc.body(), exc.status, exc.headers, JSON)


def storage_refusal(exc: Exception) -> GatewayError | None:
    """Return what clients get when the database or a disk fails; None for another exception.

    The log says why, once a minute for the same reason.
    """
    if not _is_storage_fault(exc):
        return None
    text = str(exc).strip()
    _fault_log.warn(f"{type(exc).__name__}: {text}")
    if _is_full(exc, text):
        return GatewayError(
            507, "the gateway cannot write: its disk or database is full", code="storage_full"
        )
    return GatewayError(
        503,
        "the gateway's database cannot be used now; try again later",
        code="storage_unavailable",
        headers={"retry-after": "5"},
    )


def _is_storage_fault(exc: Exception) -> bool:
    if isinstance(exc, OSError):
        return exc.errno in _FULL
    psycopg = sys.modules.get("psycopg")
    servers = () if psycopg is None else (psycopg.OperationalError, psycopg.InterfaceError)
    return isinstance(exc, (sqlite3.OperationalError, DatabaseAway, *servers))


def _is_full(exc: Exception, text: str) -> bool:
    return isinstance(exc, OSError) or "is full" in text or getattr(exc, "sqlstate", None) == DISK_FULL


class _FaultLog:
    """Logs a reason once in a while, as every request meets it."""

    def __init__(self) -> None:
        self._reason = ""
        self._quiet_until = 0.0

    def warn(self, reason: str) -> None:
        now = time.monotonic()
        if reason != self._reason or now > self._quiet_until:
            self._reason, self._quiet_until = reason, now + QUIET_SECONDS
            logger.warning("the gateway's storage fails: %s", reason)


_fault_log = _FaultLog()


def json_reply(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


async def read_body(request: Request, limit: int = BODY_BYTES) -> bytes:
    """Return the body; raise GatewayError for one that is longer than the limit."""
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_long(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_long(limit)
            parts.append(part)
    except ClientDisconnect:
        raise GatewayError(499, "the client left before its request was complete") from None
    return b"".join(parts)


def too_long(limit: int) -> GatewayError:
    return GatewayError(413, f"the request is longer than {limit >> 20} MiB", code="request_too_large")


def decoded(body: bytes, shape: type[T]) -> T:
    """Return the body in its shape; raise GatewayError for another one."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise GatewayError(400, f"the body is not what this route takes: {exc}") from None
    except RecursionError:
        raise GatewayError(400, "the body is nested too deeply") from None


def is_utf8(data: bytes) -> bool:
    """Return whether it is UTF-8, without a second copy of it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(data)
    try:
        for start in range(0, len(data), PIECE_BYTES):
            decoder.decode(view[start : start + PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def whole_number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Return a number of the query; raise GatewayError for one outside the range."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not least <= int(text[:9]) <= most:
        raise GatewayError(400, f"{name} is a number from {least} to {most}", parameter=name)
    return int(text[:9])


def order_of(request: Request) -> str:
    """Return the order of a list: asc or desc, the newest first."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise GatewayError(400, "order is asc or desc", parameter="order")
    return order


def headers_for_frontend(request: Request) -> dict[str, str]:
    """Return what a request to the frontend carries of the client's."""
    mine = dict(caller_of(request.headers).for_frontend)
    mine.update({name: request.headers[name] for name in FORWARDED if name in request.headers})
    return mine | {"content-type": JSON}


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result, or end the work when the client goes away. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _discard(task)
        raise
    finally:
        gone.cancel()
    if not task.done():
        await _discard(task)
        raise GatewayError(499, "the client went away")
    return task.result()  # nothing may wait before it: who is cancelled there would leave the answer open


async def _discard(task: asyncio.Future[Any]) -> None:
    """End the work, and close an answer that came at the same moment."""
    task.cancel()
    outcomes: list[object] = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcomes[0], httpx.Response):
        await outcomes[0].aclose()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def send(
    frontend: httpx.AsyncClient, path: str, body: bytes, headers: dict[str, str]
) -> httpx.Response:
    """Return an answer whose body was not read; raise GatewayError if there is none, or an error."""
    try:
        answer = await frontend.send(
            frontend.build_request("POST", path, content=body, headers=headers, timeout=_TIMEOUT), stream=True
        )
    except httpx.HTTPError as exc:
        raise unreachable(exc) from exc
    if answer.status_code != 200:
        raise refused(answer.status_code, await read_answer(answer), answer.headers.get("retry-after"))
    return answer


async def read_answer(answer: httpx.Response) -> bytes:
    """Return the whole answer; raise GatewayError if it breaks off."""
    try:
        return await answer.aread()
    except httpx.HTTPError as exc:
        raise unreachable(exc) from exc
    finally:
        await answer.aclose()


async def ask(frontend: httpx.AsyncClient, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    return await read_answer(await send(frontend, path, body, headers))


def unreachable(exc: Exception) -> GatewayError:
    kind = type(exc).__name__
    return GatewayError(502, f"the frontend did not answer ({kind})", code="frontend_unavailable")


def refused(status: int, body: bytes, retry_after: str | None = None) -> GatewayError:
    """Return an error of the frontend in the shape of OpenAI's."""
    headers = {} if retry_after is None else {"retry-after": retry_after}
    try:
        fault = msgspec.json.decode(body, type=_Fault)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fault = _Fault(message=body[:500].decode(errors="replace"))
    inner = fault.error
    if isinstance(inner, dict) and isinstance(inner.get("message"), str):
        code, parameter = (inner.get(name) for name in ("code", "param"))
        return GatewayError(
            status,
            inner["message"],
            code=code if isinstance(code, str) else None,
            parameter=parameter if isinstance(parameter, str) else None,
            headers=headers,
        )
    message = fault.message or (inner if isinstance(inner, str) else None) or f"status {status}"
    return GatewayError(status, message, headers=headers)
