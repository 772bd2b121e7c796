"""Answers /v1/audio/transcriptions and /v1/audio/translations: a form with a file in, its text out."""

from __future__ import annotations

import base64
import contextlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.apis import transcripts
from dynamo_vllm.gateway.apis.calls import missing
from dynamo_vllm.gateway.apis.transcripts import FORMATS, STREAMED, VERBOSE, Ending, Transcript
from dynamo_vllm.gateway.exchange import answered, too_long, while_connected
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.uploads import receive

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from dynamo_vllm.gateway.apis.calls import Workers
    from dynamo_vllm.gateway.uploads import Received
    from dynamo_vllm.serving.calls.caller import Chunk

    Admit = Callable[[str, Mapping[str, str]], Awaitable[dict[str, str]]]
    Events = AsyncGenerator[Chunk, None]

TASKS = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
API = "transcriptions"
"""What a worker must offer."""
FILE_BYTES = 25 << 20
FORM_BYTES = 64 << 10
"""What a form may have beside the file."""
HELD_BYTES = 512 << 20
"""Of files that are being received or sent to workers; further ones are told to come again."""
COPIES = 3
"""The file itself, its text in base64, and that text as a message."""
GRANULARITIES = ("segment", "word")


@dataclass(frozen=True, slots=True)
class Asked:
    """The fields of a form."""

    model: str
    task: str
    response_format: str
    is_streamed: bool
    wants: tuple[str, ...]
    language: str | None
    prompt: str | None
    temperature: float | None

    def for_worker(self, filename: str, file: str) -> dict[str, Any]:
        fields = {
            "language": self.language,
            "prompt": self.prompt,
            "temperature": self.temperature,
        }
        return {
            "model": self.model,
            "task": self.task,
            "file": file,
            "filename": filename,
            "response_format": self.response_format,
            "timestamp_granularities": list(self.wants),
            "stream": self.is_streamed,
            **{name: value for name, value in fields.items() if value is not None},
        }


class Transcription:
    """The routes and what they need."""

    def __init__(self, workers: Workers, admit: Admit, *, held_bytes: int = HELD_BYTES) -> None:
        """`admit` decides about a request of which Envoy has not seen the model; it raises GatewayError."""
        self._workers = workers
        self._admit = admit
        self._room = held_bytes

    def routes(self) -> list[Route]:
        return [Route(path, answered(self._answer), methods=["POST"]) for path in TASKS]

    async def _answer(self, request: Request) -> Response:
        async with contextlib.AsyncExitStack() as open_until_answered:
            asked, body = await self._read(request, open_until_answered)
            limits = await self._admit(request.url.path, self._for_check(request, asked))
            chunks = self._workers.stream(request, API, body)
            open_until_answered.push_async_callback(chunks.aclose)
            first = await while_connected(request, _next(chunks))
            if first is None:
                raise GatewayError(502, "the worker ended before it answered")
            if asked.is_streamed:
                events = _events(first, chunks, asked)
                return _Streamed(events, limits, open_until_answered.pop_all())
            made = await while_connected(request, _whole(first, chunks, asked))
        write, content_type = FORMATS[asked.response_format]
        return Response(write(made), headers=limits, media_type=content_type)

    async def _read(
        self, request: Request, open_until_answered: contextlib.AsyncExitStack
    ) -> tuple[Asked, dict[str, Any]]:
        """Return the fields, and what the worker gets."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise GatewayError(415, "send a form (multipart/form-data) with file and model")
        said = request.headers.get("content-length", "")
        size = int(said) if said.isdecimal() else FILE_BYTES
        if size > FILE_BYTES + FORM_BYTES:
            raise too_long(FILE_BYTES)
        open_until_answered.enter_context(self._holding(COPIES * size))
        file = io.BytesIO()
        form = await receive(request, file, FILE_BYTES, "file and model")
        asked = read(form, TASKS[request.url.path])
        if form.size == 0:
            raise GatewayError(400, "file is empty", parameter="file")
        return asked, asked.for_worker(form.filename, base64.b64encode(file.getbuffer()).decode("ascii"))

    @contextlib.contextmanager
    def _holding(self, size: int) -> Iterator[None]:
        if size > self._room:
            raise GatewayError(
                503, "too many files are being uploaded; try again", headers={"retry-after": "2"}
            )
        self._room -= size
        try:
            yield
        finally:
            self._room += size

    def _for_check(self, request: Request, asked: Asked) -> dict[str, str]:
        """Return what Envoy would tell of a body that it can read; a file's bytes are not its tokens."""
        named = {name: request.headers.get(name, "") for name in (identity.KEY, identity.REQUEST)}
        return {**named, identity.MODEL: asked.model}


def read(form: Received, task: str) -> Asked:
    """Return the fields; raise GatewayError for what cannot be done."""
    model = form.one("model")
    if not model:
        raise missing("model")
    response_format = form.one("response_format") or transcripts.JSON
    if response_format not in FORMATS:
        raise GatewayError(
            400, f"response_format is one of {', '.join(FORMATS)}", parameter="response_format"
        )
    is_streamed = _is_true(form.one("stream"))
    if is_streamed and response_format not in STREAMED:
        raise GatewayError(
            400, f"{response_format} is not streamed; leave stream out", parameter="response_format"
        )
    return Asked(
        model=model,
        task=task,
        response_format=response_format,
        is_streamed=is_streamed,
        wants=_wants(form, response_format),
        language=form.one("language") or None,
        prompt=form.one("prompt") or None,
        temperature=_temperature(form.one("temperature")),
    )


def _wants(form: Received, response_format: str) -> tuple[str, ...]:
    name = "timestamp_granularities"
    found = tuple(dict.fromkeys([*form.fields.get(f"{name}[]", ()), *form.fields.get(name, ())]))
    if any(one not in GRANULARITIES for one in found):
        raise GatewayError(400, f"{name} are some of {', '.join(GRANULARITIES)}", parameter=name)
    if found and response_format != VERBOSE:
        raise GatewayError(400, f"{name} need response_format {VERBOSE}", parameter=name)
    return found or GRANULARITIES[:1]


def _is_true(text: str | None) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False, "": False}
    try:
        return known[(text or "").lower()]
    except KeyError:
        raise GatewayError(400, "stream is true or false", parameter="stream") from None


def _temperature(text: str | None) -> float | None:
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= 1.0:
        raise GatewayError(400, "temperature is a number from 0 to 1", parameter="temperature")
    return found


async def _next(chunks: Events) -> Chunk | None:
    return await anext(chunks, None)


async def _pieces(first: Chunk, chunks: Events) -> AsyncIterator[str | Ending]:
    """Yield the pieces of the text, then the ending; raise GatewayError if there is none."""
    chunk: Chunk | None = first
    while chunk is not None:
        if chunk.get("text"):
            yield str(chunk["text"])
        if chunk.get("done"):
            yield msgspec.convert(chunk, Ending)
            return
        chunk = await _next(chunks)
    raise GatewayError(502, "the worker ended before the end of the text")


async def _whole(first: Chunk, chunks: Events, asked: Asked) -> Transcript:
    texts: list[str] = []
    async for piece in _pieces(first, chunks):
        if isinstance(piece, Ending):
            return Transcript("".join(texts).strip(), piece, asked.task, asked.wants)
        texts.append(piece)
    raise AssertionError("the pieces end with an ending")


async def _events(first: Chunk, chunks: Events, asked: Asked) -> AsyncIterator[bytes]:
    texts: list[str] = []
    try:
        async for piece in _pieces(first, chunks):
            if isinstance(piece, Ending):
                made = Transcript("".join(texts).strip(), piece, asked.task, asked.wants)
                yield transcripts.done_event(made)
            else:
                texts.append(piece)
                yield transcripts.delta_event(piece)
    except GatewayError as exc:
        yield transcripts.error_event(exc.body())
    yield transcripts.END


class _Streamed(StreamingResponse):
    """Stops the worker also if the client went away before the first byte."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], headers: dict[str, str], is_open: contextlib.AsyncExitStack
    ) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", **headers})
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._is_open.aclose()
