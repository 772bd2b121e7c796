"""Reads streamed answers from one HTTP connection, at a cost of a few microseconds per event.

All events of one read from the socket get the same time: a client cannot tell them apart.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import cast

import httptools
import msgspec

from dynamo_vllm.bench.http.answers import Answer, decode_chunk

_SHOWN_CHARACTERS = 200


class Stale(Exception):
    """The server closed an idle connection before it read the request; the client sends it again."""


class Connection(asyncio.Protocol):
    """A connection that sends one request at a time."""

    def __init__(self) -> None:
        self.used = False
        self.closed = False
        self.last_read = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None

    async def ask(self, request: bytes, keep_text: bool = False) -> Answer:
        """Send a whole request and return the answer, which is complete or holds an error."""
        assert self._answer is None and self._transport is not None
        if self.closed:
            raise Stale
        self._begin(keep_text)
        # A local variable, because the answer may be complete before the future is awaited.
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._done = done
        self._transport.write(request)
        try:
            return await done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self.used = True

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        """End the running request with an error."""
        if self._answer is not None:
            self._answer.error = self._answer.error or reason
            self._keeps_alive = False
            self._complete()

    def abort(self) -> None:
        """End the running request and mark its answer as aborted."""
        if self._answer is not None:
            self._answer.aborted = True
            self.fail("")

    @property
    def events(self) -> int:
        """How many tokens of the running request have arrived."""
        return self._answer.events if self._answer is not None else 0

    # --- one answer ---------------------------------------------------------------------------------------

    def _begin(self, keep_text: bool) -> None:
        self.last_read = time.monotonic()
        self._answer = Answer(sent=self.last_read)
        self._gaps = array("f")
        self._pieces: list[str] | None = [] if keep_text else None
        self._status = 0
        self._has_length = False
        self._is_stream = False
        self._content_type = ""
        self._keeps_alive = True
        self._finished = False
        self._is_silent = True
        self._parser = httptools.HttpResponseParser(self)
        self._text = b""

    def _complete(self) -> None:
        answer, done = self._answer, self._done
        if answer is None or done is None:
            return
        self._answer = self._done = None
        answer.ended = time.monotonic()
        answer.gaps = self._gaps.tobytes()
        if self._pieces is not None:
            answer.text = "".join(self._pieces)
        if not answer.error and not answer.aborted and self._status == 200:
            if not self._is_stream:
                answer.error = f"the answer is not a stream; its type is {self._content_type or 'not given'}"
            elif not self._finished:
                answer.error = f"the stream ended early, after {answer.events} events"
            elif not answer.output_tokens:
                answer.output_tokens = answer.events  # the server sends no usage
        if not self._keeps_alive:
            self.close()
        if not done.done():
            done.set_result(answer)

    # --- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self.last_read = time.monotonic()
        if self._answer is None:  # no request is running
            self.close()
            return
        self._is_silent = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:  # a bug in this class
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            framing = "the chunks of the answer are malformed"
            self.fail(framing if self._status else "the server does not speak HTTP")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        answer, done = self._answer, self._done
        if answer is None or done is None:
            return
        if self._is_silent and self.used:
            self._answer = self._done = None
            if not done.done():
                done.set_exception(Stale())
        elif self._status and not self._has_length and exc is None:  # the end of the connection ends the body
            self._end_of_body()
        else:
            after = f"after {answer.events} events" if self._status else "before an answer"
            self.fail(f"the connection was closed {after}")

    # --- callbacks of httptools ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._answer is None:  # the server sends a second answer to one request
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self._content_type = value.decode("latin-1").lower()
            case b"content-length" | b"transfer-encoding":
                self._has_length = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # lower ones are informational and precede the answer
            self._status = status
            self._is_stream = self._content_type.startswith("text/event-stream")

    def on_body(self, body: bytes) -> None:
        text = self._text + body if self._text else body
        if not self._is_stream or self._status != 200:
            self._text = text
            return
        if b"\r" in text:
            text = _with_unix_line_ends(text)
        events = text.split(b"\n\n")
        self._text = events.pop()
        for event in events:
            self._read_event(event)

    def on_message_complete(self) -> None:
        if self._status and self._answer is not None:
            self._keeps_alive = self._keeps_alive and self._parser.should_keep_alive()
            self._end_of_body()

    def _end_of_body(self) -> None:
        if self._status != 200:
            assert self._answer is not None
            self._answer.error = f"HTTP {self._status}: {_message(self._text)}"
        elif self._is_stream and self._text.strip():
            self._read_event(self._text.strip(b"\r\n"))
        self._complete()

    # --- server-sent events -------------------------------------------------------------------------------

    def _read_event(self, event: bytes) -> None:  # noqa: C901  # a call per event would cost as much again
        if event.startswith(b"data: ") and b"\n" not in event:
            data, kind = event[6:], b""
        else:
            data, kind = _fields(event)
        if kind == b"error":
            self._set_error(_message(data) if data else _comment(event))
            return
        if data == b"[DONE]":
            self._finished = True
            return
        if not data:
            return
        answer = self._answer
        if answer is None:
            return
        try:
            chunk = decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            self._set_error(f"an event of the stream cannot be read: {exc}")
            return
        if chunk.error is not None:
            self._set_error(_message(data))
        now = self.last_read
        for choice in chunk.choices:
            finish = choice.finish_reason
            if finish is not None:
                self._finished = True
            elif choice.delta is not None and choice.only_announces():
                continue
            if self._pieces is not None:
                self._pieces.append(choice.added())
            if not answer.first:
                answer.first = now
            elif finish is None or choice.added():
                self._gaps.append(now - answer.last)
            else:  # this event only ends the answer
                continue
            answer.last = now
            answer.events += 1
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.output_tokens = chunk.usage.completion_tokens
            cached = (chunk.usage.prompt_tokens_details or {}).get("cached_tokens")
            answer.cached_tokens = cached if isinstance(cached, int) else None

    def _set_error(self, error: str) -> None:
        if self._answer is not None:
            self._answer.error = self._answer.error or error


def _with_unix_line_ends(text: bytes) -> bytes:
    """Replace CR LF by LF. A CR at the end stays, because its LF may be in the next read."""
    return text.replace(b"\r\n", b"\n")


def _fields(event: bytes) -> tuple[bytes, bytes]:
    """Return the data and the type of a server-sent event."""
    data, kind = [], b""
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        elif name == b"event":
            kind = value.strip()
    return b"\n".join(data), kind


def _comment(event: bytes) -> str:
    """Return the comment of an event, where the Dynamo frontend puts the reason of an error."""
    lines = (line[1:].strip() for line in event.split(b"\n") if line.startswith(b":"))
    return _message(b" ".join(lines))


def _message(body: bytes) -> str:
    """Return the message of an error response, of any shape."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = body.decode("utf-8", "replace")
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or found.get("detail") or str(found)
    return " ".join(str(found).split())[:_SHOWN_CHARACTERS] or "no reason given"
