"""Passes requests for models on to the deployment, and streams the answers back to the page."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import httpx
from starlette.responses import StreamingResponse

from dynamo_vllm.console.replies import ConsoleError, read_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

BODY_BYTES = 16 << 20
BODY_SECONDS = 300.0
MOST_UPLOADS = 8
"""Larger bodies that are read at once; the others wait for their turn."""
SMALL_BYTES = 64 << 10
READ = ("models",)
ASKED = (
    *("chat/completions", "completions", "embeddings", "rerank", "score", "classify", "pooling"),
    *("images/generations", "audio/transcriptions", "audio/translations", "audio/speech"),
)
FORWARDED = ("content-type", "accept", "authorization", "x-request-id")
"""Headers of the page's request; never its cookie."""
RETURNED = ("content-type", "retry-after", "x-request-id")
ACTIVE = ("text/html", "application/xhtml", "image/svg", "text/xml", "application/xml")
"""Types that a browser could run something of."""


async def passed_on(request: Request, deployment: httpx.AsyncClient, uploads: asyncio.Semaphore) -> Response:
    path: str = request.path_params["path"]
    if path not in (READ if request.method == "GET" else ASKED):
        raise ConsoleError(404, f"the console does not pass on {request.method} /v1/{path}")
    async with contextlib.nullcontext() if _is_small(request) else uploads:
        body = await read_body(request, BODY_BYTES, BODY_SECONDS)
    headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
    headers["accept-encoding"] = "identity"  # the answer is passed on as it comes
    asked = deployment.build_request(request.method, f"/v1/{path}", content=body, headers=headers)
    try:
        answer = await _head(request, deployment, asked)
    except httpx.HTTPError as exc:
        why = str(exc) or type(exc).__name__
        raise ConsoleError(502, f"the deployment does not answer: {why}", "see the overview") from None
    found = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
    if found.get("content-type", "").startswith(ACTIVE):
        found["content-type"] = "application/octet-stream"
    return StreamingResponse(_parts(answer), answer.status_code, found)


def _is_small(request: Request) -> bool:
    """Return whether the body need not wait; the server reads no more of it than the length it names."""
    if "transfer-encoding" in request.headers:
        return False
    length = request.headers.get("content-length", "0")
    return length.isdecimal() and int(length) <= SMALL_BYTES


async def _head(request: Request, deployment: httpx.AsyncClient, asked: httpx.Request) -> httpx.Response:
    """Return the answer once it begins; if the page goes away before, the deployment learns of it."""
    sending = asyncio.ensure_future(deployment.send(asked, stream=True))
    leaving = asyncio.ensure_future(_has_left(request))
    try:
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            return await sending
    finally:
        leaving.cancel()
        sending.cancel()  # one that is done stays done
        await asyncio.wait((sending, leaving))
    raise ConsoleError(499, "the page has left before the answer")


async def _has_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the answer as it comes; the deployment learns of it if the page goes away."""
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx.HTTPError:
        return  # the page sees that the answer is not complete
    finally:
        await answer.aclose()
