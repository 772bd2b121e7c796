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

from dynamo_vllm.gateway import identity, uploads
from dynamo_vllm.gateway.apis import transcripts
from dynamo_vllm.gateway.apis.calls import missing
from dynamo_vllm.gateway.apis.transcripts import FORMATS, STREAMED, VERBOSE, Ending, Transcript
from dynamo_vllm.gateway.apis.upload_room import RETRY, SHARE, UploadRoom
from dynamo_vllm.gateway.exchange import answered, too_long, while_connected
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.tenant_slots import TenantSlots

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from dynamo_vllm.gateway.apis.calls import Workers
    from dynamo_vllm.gateway.uploads import Received
    from dynamo_vllm.serving.calls.caller import Chunk

    CheckLimits = Callable[[str, Mapping[str, str]], Awaitable[dict[str, str]]]
    CheckModel = Callable[[Mapping[str, str]], None]
    Events = AsyncGenerator[Chunk, None]

TASKS = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
API = "transcriptions"
"""What a worker must offer."""
FILE_BYTES = 25 << 20
HELD_BYTES = 512 << 20
"""Of files that have come, until they are answered; further ones are told to come again."""
MOST_UPLOADS = 64
"""Forms that come at the same time; one tenant has at most three quarters."""
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

    def __init__(
        self,
        workers: Workers,
        check_limits: CheckLimits,
        check_model: CheckModel,
        *,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        """The checks raise GatewayError; Envoy cannot read a form, so nobody has asked them yet."""
        self._workers = workers
        self._check_limits = check_limits
        self._check_model = check_model
        self.room = UploadRoom(held_bytes)
        self.slots = TenantSlots(lambda: MOST_UPLOADS, share=SHARE)

    def routes(self) -> list[Route]:
        return [Route(path, answered(self._answer), methods=["POST"]) for path in TASKS]

    async def _answer(self, request: Request) -> Response:
        size = declared_size(request)
        headers = {name: request.headers.get(name, "") for name in (identity.KEY, identity.REQUEST)}
        # Before the form, which a client may send slowly. A file's bytes are not its tokens.
        limits = await self._check_limits(request.url.path, headers)
        async with contextlib.AsyncExitStack() as open_until_answered:
            tenant = identity.caller_of(request.headers).tenant
            grow = open_until_answered.enter_context(self.room.growing(tenant))
            with self._uploading(tenant):
                fields, body = await self._read(request, uploads.seconds_for(size), grow)
            self._check_model({**headers, identity.MODEL: fields.model})
            chunks = self._workers.stream(request, API, body)
            open_until_answered.push_async_callback(chunks.aclose)
            first = await while_connected(request, _next(chunks))
            if first is None:
                raise GatewayError(502, "the worker ended before it answered")
            if fields.is_streamed:
                events = _events(first, chunks, fields)
                return _Streamed(events, limits, open_until_answered.pop_all())
            transcript = await while_connected(request, _whole(first, chunks, fields))
        write, content_type = FORMATS[fields.response_format]
        return Response(write(transcript), headers=limits, media_type=content_type)

    async def _read(
        self, request: Request, seconds: float, grow: Callable[[int], None]
    ) -> tuple[Asked, dict[str, Any]]:
        """Return the fields, and what the worker gets."""
        file = io.BytesIO()
        form = await uploads.receive(
            request,
            file,
            FILE_BYTES,
            "file and model",
            seconds=seconds,
            on_bytes=lambda size: grow(COPIES * size),
        )
        fields = read(form, TASKS[request.url.path])
        if form.size == 0:
            raise GatewayError(400, "file is empty", parameter="file")
        return fields, fields.for_worker(form.filename, base64.b64encode(file.getbuffer()).decode("ascii"))

    @contextlib.contextmanager
    def _uploading(self, tenant: str) -> Iterator[None]:
        if not self.slots.try_take(tenant):
            raise GatewayError(429, "too many files are being uploaded; try again", headers=RETRY)
        try:
            yield
        finally:
            self.slots.give_back(tenant)


def declared_size(request: Request) -> int:
    """Return the length of a form, the largest if it declares none; raise GatewayError for what is none."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise GatewayError(415, "send a form (multipart/form-data) with file and model")
    length = request.headers.get("content-length", "")
    most = FILE_BYTES + uploads.FORM_BYTES
    size = int(length) if length.isdecimal() else most
    if size > most:
        raise too_long(FILE_BYTES)
    return size


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
