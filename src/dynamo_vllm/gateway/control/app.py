"""Routes what Envoy sends to the control app: its questions first, then the APIs.

Everything on the Unix socket comes from Envoy, whose user alone can open it. The status port has two paths
only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import Response

from dynamo_vllm.gateway.control.authorization import Question, client_has_left
from dynamo_vllm.gateway.envoy.config import BODY_PATH, KEY_PATH
from dynamo_vllm.gateway.replies import GatewayError, error_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import Receive, Scope, Send

    from dynamo_vllm.gateway.control.authorization import Authorizer

logger = logging.getLogger(__name__)
_JSON = (b"content-type", b"application/json")
_CHECKS = (KEY_PATH, BODY_PATH)


class ControlApp:
    """An ASGI application."""

    def __init__(
        self,
        authorizer: Authorizer,
        routes: Sequence[BaseRoute],
        metrics: Callable[[], Awaitable[str]],
        stopped: Callable[[], Sequence[str]],
    ) -> None:
        """`stopped` names the threads and loops that should run and do not."""
        self._authorizer = authorizer
        self._metrics = metrics
        self._stopped = stopped
        self._apis = Starlette(
            routes=list(routes),
            exception_handlers={GatewayError: _refused, 404: _unknown, 405: _unknown, Exception: _failed},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if scope["server"] is not None and scope["server"][1] is not None:
            await self._status(path, send)
        elif path.startswith(_CHECKS):
            await self._answer(scope, receive, send)
        else:
            await self._apis(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = next(prefix for prefix in _CHECKS if scope["path"].startswith(prefix))
        path: str = scope["path"].removeprefix(prefix)
        try:
            passed = await self._check(prefix, path, scope, receive)
        except GatewayError as exc:
            await respond(send, exc.status, [_JSON, *encoded(exc.headers)], exc.body(path))
        except Exception:  # a bug must not let anybody in, and must not take the others with it
            logger.exception("a request could not be checked")
            body = error_body(500, "the gateway could not check this request", path=path)
            await respond(send, 500, [_JSON], body)
        else:
            await respond(send, 200, encoded(passed), b"")

    async def _check(self, prefix: str, path: str, scope: Scope, receive: Receive) -> dict[str, str]:
        """Return the headers that the request gets."""
        headers = {decoded(name): decoded(value) for name, value in scope["headers"]}
        if prefix == KEY_PATH:
            question = Question(scope["method"], path, decoded(scope["query_string"]), headers)
            return await self._authorizer.check_key(question, lambda: left(receive))
        body = await whole_body(receive)
        return await self._authorizer.check_body(path, headers, body, lambda: left(receive))

    async def _status(self, path: str, send: Send) -> None:
        if path == "/live":
            stopped = self._stopped()
            text = f"not running any more: {', '.join(stopped)}\n" if stopped else ""
            await respond(send, 503 if stopped else 200, [], text.encode())
        elif path == "/metrics":
            text = await self._metrics()
            await respond(send, 200, [(b"content-type", b"text/plain; version=0.0.4")], text.encode())
        else:
            await respond(send, 404, [], b"")


async def left(receive: Receive) -> None:
    """Return when Envoy no longer waits for the answer: its client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole_body(receive: Receive) -> bytes:
    parts, is_more = [], True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_has_left()
        parts.append(message.get("body", b""))
        is_more = message.get("more_body", False)
    return b"".join(parts)


async def respond(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def decoded(header: bytes) -> str:
    """Return a header's text: UTF-8, as names of models are, and whatever else a client sends."""
    return header.decode("utf-8", "surrogateescape")


def encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in headers.items()]


def _refused(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, GatewayError)
    return Response(exc.body(), exc.status, exc.headers, "application/json")


def _unknown(request: Request, exc: Exception) -> Response:
    status: int = getattr(exc, "status_code", 404)
    message = f"there is no {request.method} {request.url.path}"
    return Response(error_body(status, message), status, media_type="application/json")


def _failed(request: Request, exc: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=exc)
    return Response(
        error_body(500, "the gateway failed; its log says why"), 500, media_type="application/json"
    )
