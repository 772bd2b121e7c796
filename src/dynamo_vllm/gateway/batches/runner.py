"""Runs one batch from where it stands to its end."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import httpx
import msgspec

from dynamo_vllm.gateway.batches import lines, parts
from dynamo_vllm.gateway.batches.files import OUTPUT
from dynamo_vllm.gateway.batches.outage import is_outage
from dynamo_vllm.gateway.batches.parts import line_id
from dynamo_vllm.gateway.batches.store import Answer
from dynamo_vllm.gateway.exchange import CONNECT_SECONDS, JSON, refused
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

    from dynamo_vllm.gateway.batches.files import FileStore
    from dynamo_vllm.gateway.batches.pace import Pace
    from dynamo_vllm.gateway.batches.store import Batch, BatchStore
    from dynamo_vllm.gateway.database import Database, Transaction

logger = logging.getLogger(__name__)
T = TypeVar("T")
AGAIN = (408, 429, 502, 503, 504, 529)
MOST_TRIES = 12
AWAY_SECONDS = 300.0
"""A try counts after this time even if no other line succeeded: all others may have ended."""
FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 30.0
READ_AHEAD = 64
GATHER_SECONDS = 0.02
"""How long answers wait for others: they cost one commit together."""
_TIMEOUT = httpx.Timeout(None, connect=CONNECT_SECONDS)


class NotOurs(Exception):
    """Another gateway runs the batch now."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Of chats and completions, or of responses."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None

    def tokens(self) -> tuple[int, int, int, int]:
        given = self.prompt_tokens_details or self.input_tokens_details or _Details()
        made = self.completion_tokens_details or self.output_tokens_details or _Details()
        return (
            self.prompt_tokens or self.input_tokens or 0,
            given.cached_tokens or 0,
            self.completion_tokens or self.output_tokens or 0,
            made.reasoning_tokens or 0,
        )


class _Used(msgspec.Struct):
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """The answer to a line, before it is on the disk."""

    number: int
    text: bytes
    is_error: bool
    tokens: tuple[int, int, int, int]


class Gate(Protocol):
    """Decides about each line as about a request of its own."""

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        """Return the headers with which a line is sent, once its key's limits allow it.

        Raise GatewayError for a line that its key may not send.
        """

    def ended(self, request_id: str) -> None:
        """A line that was admitted has its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every run needs."""

    database: Database
    store: BatchStore
    files: FileStore
    frontend: httpx.AsyncClient
    apis: httpx.AsyncClient
    """Answers what workers answer without the frontend."""
    pace: Pace
    parts: Path
    concurrency: int
    gate: Gate
    most_lines: int
    beat_seconds: float


class Source:
    """The lines of a file that have no answer yet, read by whoever needs the next."""

    def __init__(self, path: Path, answered: set[int]) -> None:
        self._file = path.open("rb")
        self._answered = answered
        self._numbered: Iterator[tuple[int, bytes]] = lines.numbered(self._file)
        self._ahead: list[tuple[int, bytes]] = []
        self._lock = asyncio.Lock()
        self._closed = threading.Lock()

    async def next(self) -> tuple[int, bytes] | None:
        async with self._lock:
            if not self._ahead:
                self._ahead = await asyncio.to_thread(self._read)
            return self._ahead.pop() if self._ahead else None

    def close(self) -> None:
        with self._closed:
            self._file.close()

    def _read(self) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        size = 0
        with self._closed:
            while not self._file.closed and len(found) < READ_AHEAD and size < 1 << 20:
                one = next(self._numbered, None)
                if one is None:
                    break
                if one[0] not in self._answered:
                    found.append(one)
                    size += len(one[1])
        return found[::-1]


class Run:
    """One batch in this gateway; `owner` is its name there and in the database."""

    def __init__(self, tools: Tools, batch: Batch, owner: str) -> None:
        self._tools = tools
        self._batch = batch
        self._owner = owner
        self._folder = tools.parts / batch.id
        self._input = tools.files.path(batch.file_id)
        self._made: list[Made] = []
        self._has_made = asyncio.Event()
        self._successes = 0
        self._is_stopped = False
        self._has_failed_line = False

    def stop(self) -> None:
        """Look at the batch's state now: it was cancelled."""
        self._has_made.set()

    async def run(self) -> None:
        """Check, run and finish the batch; raise NotOurs if another gateway has it."""
        if self._batch.status == "validating" and not await self._check():
            return
        if self._batch.status in ("validating", "in_progress"):
            await self._answer_lines()
        await self._finish()

    async def _check(self) -> bool:
        batch, tools = self._batch, self._tools
        checking = asyncio.to_thread(lines.check, self._input, batch.endpoint, tools.most_lines)
        total, faults = await self._beating(checking)
        is_good = await tools.database.run(
            lambda t: tools.store.checked(t, batch.id, self._owner, total, faults)
        )
        if faults:
            logger.info("batch %s: failed the check: %s", batch.id, faults[0].message)
            return False
        if not is_good:  # cancelled meanwhile, or not ours
            self._batch = await self._current()
        return True

    async def _answer_lines(self) -> None:
        tools, batch = self._tools, self._batch
        pieces = await tools.database.run(lambda t: tools.store.answered(t, batch.id))
        gone = await asyncio.to_thread(parts.lost, self._folder, pieces)
        if gone:
            logger.warning(
                "batch %s: %d answers are not on the disk; running them again", batch.id, len(gone)
            )
            await tools.database.run(lambda t: tools.store.lose(t, batch.id, gone))
        answered = {piece[0] for piece in pieces} - {number for number, _ in gone}
        source = Source(self._input, answered)
        part = await asyncio.to_thread(parts.Part, self._folder, self._owner)
        loop = asyncio.get_running_loop()
        workers = [loop.create_task(self._work(source)) for _ in range(tools.concurrency)]
        writing = loop.create_task(self._write(part))
        try:
            await asyncio.wait(
                {writing, loop.create_task(_all(workers))}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in workers:
                task.cancel()
            done = await asyncio.gather(*workers, return_exceptions=True)
            self._is_stopped = True
            self._has_made.set()
            try:
                await writing
            finally:
                source.close()
                part.close()
        for result in done:
            if isinstance(result, Exception):
                raise result

    async def _work(self, source: Source) -> None:
        while (one := await source.next()) is not None:
            async with self._tools.pace:
                made = await self._answer_or_error(*one)
            self._made.append(made)
            self._has_made.set()

    async def _answer_or_error(self, number: int, line: bytes) -> Made:
        """Return an error for a line that cannot be run, whatever the reason: others can."""
        try:
            return await self._answer(number, line)
        except Exception as exc:
            if is_outage(exc):
                raise
            if not self._has_failed_line:
                self._has_failed_line = True
                logger.exception("batch %s: line %d cannot be run", self._batch.id, number)
            return self._failed_line(number, line, exc)

    def _failed_line(self, number: int, line: bytes, exc: Exception) -> Made:
        request_id = f"{self._batch.id}-{number}"
        if not isinstance(exc, GatewayError):
            status = 400 if isinstance(exc, (*lines.UNREADABLE, OverflowError)) else 500
            exc = GatewayError(status, f"this line cannot be run ({type(exc).__name__})", code="invalid_line")
        text = _line(request_id, lines.custom_id_of(line), exc.status, exc.body())
        return Made(number, text, True, (0, 0, 0, 0))

    async def _answer(self, number: int, line: bytes) -> Made:
        """Ask until there is an answer.

        A try counts against the line if another one succeeded meanwhile; a deployment that is away for some
        time fails no line.
        """
        batch = self._batch
        custom_id, body = lines.request_of(line, batch.endpoint)
        request_id = f"{batch.id}-{number}"
        tries, successes, counted, wait = 0, -1, time.monotonic(), FIRST_WAIT_SECONDS
        while True:
            status, answer = await self._ask(request_id, body)
            if status not in AGAIN:
                break
            if successes != self._successes or time.monotonic() - counted > AWAY_SECONDS:
                tries, successes, counted = tries + 1, self._successes, time.monotonic()
            if tries >= MOST_TRIES:
                break
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)
        if status == 200:
            self._successes += 1
            return Made(number, _line(request_id, custom_id, 200, answer), False, _tokens(answer))
        answer = refused(status, answer).body()
        return Made(number, _line(request_id, custom_id, status, answer), True, (0, 0, 0, 0))

    async def _ask(self, request_id: str, body: bytes) -> tuple[int, bytes]:
        batch, tools = self._batch, self._tools
        try:
            headers = await tools.gate.admit(request_id, batch.key_id, batch.endpoint, body)
        except GatewayError as exc:
            return exc.status, exc.body()
        try:
            client = tools.apis if batch.endpoint in lines.OF_WORKERS else tools.frontend
            answer = await client.post(
                batch.endpoint, content=body, headers={**headers, "content-type": JSON}, timeout=_TIMEOUT
            )
        except httpx.HTTPError as exc:
            return 502, f"the frontend did not answer ({type(exc).__name__})".encode()
        finally:
            tools.gate.ended(request_id)
        return answer.status_code, answer.content

    async def _write(self, part: parts.Part) -> None:
        """Put answers on the disk and into the database, many at a time, until there are no more."""
        tools, batch = self._tools, self._batch
        while True:
            is_last = self._is_stopped
            made, self._made = self._made, []
            self._has_made.clear()
            starts = await asyncio.to_thread(part.append, [one.text for one in made]) if made else []
            answers = [
                Answer(one.number, start, len(one.text), one.is_error, one.tokens)
                for one, start in zip(made, starts, strict=True)
            ]
            found = await tools.database.run(
                lambda t, answers=answers: tools.store.add(t, batch.id, self._owner, answers)  # type: ignore[misc]
            )
            if found is None:
                raise NotOurs
            self._batch = found
            if is_last or found.status == "cancelling" or time.time() > found.expires:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(tools.beat_seconds):
                    await self._has_made.wait()
                    if not self._is_stopped:
                        await asyncio.sleep(GATHER_SECONDS)

    async def _finish(self) -> None:
        """Write the files; again if a gateway ended while it did so."""
        tools, store, files = self._tools, self._tools.store, self._tools.files
        batch = await tools.database.run(lambda t: store.finalize(t, self._batch.id, self._owner))
        if batch is None:
            raise NotOurs
        pieces = await tools.database.run(lambda t: store.answered(t, batch.id))
        # The owner is part of the names: one that lost the batch cannot write over what another has finished.
        kinds = ("output", "error")
        names = [f"file-{batch.id.removeprefix('batch_')}-{self._owner[:8]}-{kind}" for kind in kinds]
        output, errors = (files.path(name) for name in names)
        sizes = await self._beating(
            asyncio.to_thread(parts.put_together, self._folder, pieces, output, errors)
        )
        status, unanswered = "completed", 0
        if batch.status == "cancelling":
            status = "cancelled"
        elif len(pieces) < batch.total:
            status = "expired"
            late = ("batch_expired", "the batch's time ended before this line was run")
            numbers = {piece[0] for piece in pieces}
            adding = asyncio.to_thread(parts.add_unanswered, self._input, batch.id, numbers, errors, *late)
            unanswered, size = await self._beating(adding)
            sizes = (sizes[0], size)
        kept = [name if size else None for name, size in zip(names, sizes, strict=True)]

        def work(t: Transaction) -> None:
            if not store.end(t, batch, self._owner, status, unanswered, kept):
                raise NotOurs
            for name, kind, size in zip(kept, kinds, sizes, strict=True):
                if name is not None:
                    files.add(t, name, batch.tenant, OUTPUT, f"{batch.id}_{kind}.jsonl", size)

        await tools.database.run(work)
        logger.info("batch %s: %s", batch.id, status)
        for path, name in zip((output, errors), kept, strict=True):
            if name is None:
                await asyncio.to_thread(path.unlink, missing_ok=True)
        await asyncio.to_thread(parts.remove, self._folder)

    async def _beating(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of long work, and say meanwhile that the batch is ours."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self._tools.beat_seconds)
                await self._current()
            return task.result()
        finally:
            task.cancel()

    async def _current(self) -> Batch:
        store = self._tools.store
        found = await self._tools.database.run(lambda t: store.mine(t, self._batch.id, self._owner))
        if found is None:
            raise NotOurs
        return found


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _line(request_id: str, custom_id: str | None, status: int, body: bytes) -> bytes:
    if b"\n" in body:
        try:
            body = msgspec.json.encode(msgspec.json.decode(body))
        except lines.UNREADABLE:
            raise _unreadable() from None
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    line = {"id": line_id(request_id), "custom_id": custom_id, "response": response, "error": None}
    return msgspec.json.encode(line) + b"\n"


def _tokens(answer: bytes) -> tuple[int, int, int, int]:
    try:
        usage = msgspec.json.decode(answer, type=_Used).usage
    except msgspec.ValidationError:
        return (0, 0, 0, 0)
    except lines.UNREADABLE:
        raise _unreadable() from None
    return (0, 0, 0, 0) if usage is None else usage.tokens()


def _unreadable() -> GatewayError:
    return GatewayError(502, "the answer of the frontend cannot be read", code="invalid_answer")
