"""Passes a streamed answer on. Only events with a whole response in them are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import msgspec
from starlette.responses import StreamingResponse

from dynamo_vllm.gateway.responses.items import Fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import Receive, Scope, Send

_END = b"\n\n"
# No text of a model can look like this: its quotes are escaped.
_WHOLE = b'"response":{'
_DATA = b"data: "
_FINAL = ("response.completed", "response.incomplete", "response.failed")


class Event(msgspec.Struct):
    """One that has the response in it."""

    type: str
    sequence_number: int
    response: Fields


class Relayed(StreamingResponse):
    """Closes the frontend's answer also if the client went away before the first byte."""

    media_type = "text/event-stream"

    def __init__(self, answer: httpx.Response, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._answer.aclose()


async def unchanged(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the answer as it comes."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    except httpx.HTTPError:
        yield broken(0)


async def changed(
    answer: httpx.Response, ours: Fields, keep: Callable[[Fields], Awaitable[Fields]]
) -> AsyncIterator[bytes]:
    """Yield the answer with our fields in every response; the last one is what `keep` returns of it."""
    held = b""
    number = 0
    try:
        async for chunk in answer.aiter_raw():
            if held:
                chunk, held = held + chunk, b""
            if not chunk.endswith(_END):
                cut = chunk.rfind(_END) + len(_END)
                if cut < len(_END):
                    held = chunk
                    continue
                chunk, held = chunk[:cut], chunk[cut:]
            if _WHOLE not in chunk:
                yield chunk
                continue
            for event in chunk[: -len(_END)].split(_END):
                if _WHOLE in event:
                    parsed = _parsed(event)
                    number = parsed.sequence_number
                    parsed.response.update(ours)
                    if parsed.type in _FINAL:
                        parsed.response = await keep(parsed.response)
                    event = written(parsed)
                yield event + _END
    except httpx.HTTPError:
        yield broken(number + 1)


def written(event: Event) -> bytes:
    return b"event: " + event.type.encode() + b"\n" + _DATA + msgspec.json.encode(event)


def broken(number: int) -> bytes:
    """Return the event that says why the stream ends too early."""
    error = {
        "type": "error",
        "sequence_number": number,
        "code": "server_error",
        "message": "the frontend ended before the answer was complete",
        "param": None,
    }
    return b"event: error\n" + _DATA + msgspec.json.encode(error) + _END


def _parsed(event: bytes) -> Event:
    return msgspec.json.decode(event[event.index(_DATA) + len(_DATA) :], type=Event)
