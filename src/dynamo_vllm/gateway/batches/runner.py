"""Runs one batch from where it stands to its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import httpx

from dynamo_vllm.gateway.batches import answers, lines, parts
from dynamo_vllm.gateway.batches.answers import request_id_of
from dynamo_vllm.gateway.batches.files import OUTPUT
from dynamo_vllm.gateway.batches.lines import Fault
from dynamo_vllm.gateway.batches.outage import is_outage
from dynamo_vllm.gateway.batches.source import Source
from dynamo_vllm.gateway.batches.store import Answer
from dynamo_vllm.gateway.deferred import NotYet
from dynamo_vllm.gateway.exchange import CONNECT_SECONDS, JSON, refused
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from pathlib import Path

    from dynamo_vllm.gateway.batches.answers import LineAnswer
    from dynamo_vllm.gateway.batches.files import FileStore
    from dynamo_vllm.gateway.batches.source import LinePlace
    from dynamo_vllm.gateway.batches.store import Batch, BatchStore
    from dynamo_vllm.gateway.database import Database, Transaction
    from dynamo_vllm.gateway.deferred import Gate
    from dynamo_vllm.gateway.tenant_slots import TenantSlots

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
AGAIN = (408, 429, 502, 503, 504, 529)
MOST_TRIES = 12
AWAY_SECONDS = 300.0
"""A try counts after this time even if no other line succeeded: all others may have ended."""
FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 30.0
REFUSED_SECONDS = 3.0
GATHER_SECONDS = 0.02
"""How long answers wait for others: they cost one commit together."""
GRACE_SECONDS = 3600.0
"""How long a batch whose time has ended waits for room on the disk, or for the gateway that has its file."""
OUTPUTS = ("output", "error")
_TIMEOUT = httpx.Timeout(None, connect=CONNECT_SECONDS)


class NotOurs(Exception):
    """Another gateway runs the batch now."""


class _StorageFull(Exception):
    """The answers that there are fill what the tenant may keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every run needs."""

    database: Database
    store: BatchStore
    files: FileStore
    frontend: httpx.AsyncClient
    apis: httpx.AsyncClient
    """Answers what workers answer without the frontend."""
    line_slots: TenantSlots
    """For the lines of all batches: held from the question to the limits until the answer."""
    file_slots: TenantSlots
    """For checks and outputs of whole files, each of which occupies a thread."""
    parts: Path
    concurrency: int
    """How many lines of one batch may have begun and have no answer yet."""
    gate: Gate
    most_lines: int
    beat_seconds: float


class Run:
    """One batch in this gateway; `owner` is its name there and in the database."""

    def __init__(self, tools: Tools, batch: Batch, owner: str) -> None:
        self.owner = owner
        self.is_parked = False
        self.limited_since: float | None = None
        """Since when the limits of the key let no line pass (`time.monotonic`)."""
        self._tools = tools
        self._batch = batch
        self._folder = tools.parts / batch.id
        self._input = tools.files.path(batch.file_id)
        self._turn = asyncio.Lock()
        self._workers: list[asyncio.Task[None]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._answers: list[LineAnswer] = []
        self._has_answers = asyncio.Event()
        self._successes = 0
        self._refused_at: float | None = None
        self._refusal: GatewayError | None = None
        """Why no line will be run any more."""
        self._is_stopped = False
        self._has_failed_line = False

    @property
    def batch(self) -> Batch:
        """The batch as it was a moment ago."""
        return self._batch

    def stop(self) -> None:
        """Look at the batch's state now: it was cancelled."""
        self._has_answers.set()

    def park(self) -> None:
        """Begin no more lines: after the answers to those that were sent, `run` returns."""
        self.is_parked = True
        self._end_waits()

    async def run(self) -> None:
        """Check, run and finish the batch; raise NotOurs if another gateway has it.

        A batch that is parked may return unfinished.
        """
        if self._batch.status == "validating" and not await self._check():
            return
        is_running = self._batch.started is not None and self._batch.status != "cancelling"
        is_over = not is_running or time.time() > self._batch.expires
        try:
            if not (is_over or await self._answer_lines()):
                return
        except _StorageFull:
            message = "the tenant's files have no room for more answers; delete some"
            await self._finish(Fault("storage_full", message, None))
        else:
            await self._finish()

    async def fail(self, reason: str) -> None:
        """End the batch as failed, with the answers that there are, if their files can be written."""
        fault = Fault(
            "batch_failed", f"this batch cannot be run ({reason}); it was tried several times", None
        )
        try:
            await self._finish(fault)
        except NotOurs:
            raise
        except Exception as exc:
            if is_outage(exc) and not self.is_overdue:
                raise
            await self.abandon(fault)

    async def abandon(self, fault: Fault | None = None) -> None:
        """End the batch without files: as failed, or as expired if no reason is given."""
        batch = self._batch
        status = "expired" if fault is None else "failed"
        await self._end(batch, status, 0, (None, None), (0, 0), fault or _late(batch))
        await asyncio.to_thread(parts.remove, self._folder)

    @property
    def is_overdue(self) -> bool:
        """Whether its time ended so long ago that it ends whatever stands against it."""
        return time.time() > self._batch.expires + GRACE_SECONDS

    async def _check(self) -> bool:
        """Return whether the batch goes on."""
        batch, tools = self._batch, self._tools
        total, faults = await self._in_turn(lines.check, self._input, batch.endpoint, tools.most_lines)
        await tools.database.run(lambda t: tools.store.checked(t, batch.id, self.owner, total, faults))
        if faults:
            logger.info("batch %s: failed the check: %s", batch.id, faults[0].message)
            return False
        self._batch = await self._current()
        return True

    async def _answer_lines(self) -> bool:
        """Return whether the batch is to be finished: no more lines will be answered."""
        answered, room = await self._answered()
        with (
            contextlib.closing(Source(self._input, answered)) as source,
            contextlib.closing(parts.Part(self._folder, self.owner)) as part,
        ):
            await self._send_lines(source, part, self._batch.total - len(answered), room)
        return not self.is_parked or self._refusal is not None or await self._is_over()

    async def _send_lines(self, source: Source, part: parts.Part, count: int, room: int) -> None:
        """Answer lines until all are answered, or the batch is over or parked, or there is no room."""
        loop = asyncio.get_running_loop()
        workers = max(1, min(self._tools.concurrency, count))
        self._workers = [loop.create_task(self._work(source)) for _ in range(workers)]
        working = loop.create_task(asyncio.wait(self._workers, return_when=asyncio.FIRST_EXCEPTION))
        writing = loop.create_task(self._write(part, room))
        try:
            await asyncio.wait({writing, working}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*self._workers, working):
                task.cancel()
            results = await asyncio.gather(*self._workers, return_exceptions=True)
            self._is_stopped = True
            self._has_answers.set()
            await writing
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _answered(self) -> tuple[set[int], int]:
        """Return the numbers of the lines whose answers are on the disk, and the room for more."""
        tools, batch = self._tools, self._batch
        pieces, room = await tools.database.run(
            lambda t: (tools.store.answered(t, batch.id), tools.files.room(t, batch.tenant))
        )
        room -= sum(piece[3] for piece in pieces)
        if room <= 0:
            raise _StorageFull
        lost = await asyncio.to_thread(parts.lost, self._folder, pieces)
        if lost:
            logger.warning(
                "batch %s: %d answers are not on the disk; running them again", batch.id, len(lost)
            )
            await tools.database.run(lambda t: tools.store.lose(t, batch.id, lost))
        return {piece[0] for piece in pieces} - {number for number, _ in lost}, room

    async def _is_over(self) -> bool:
        self._batch = batch = await self._current()
        return (
            batch.status == "cancelling"
            or batch.completed + batch.failed >= batch.total
            or time.time() > batch.expires
        )

    def _end_waits(self) -> None:
        """End the workers that wait for a slot, for limits, or for a better time."""
        for task in self._workers:
            if task not in self._sending:
                task.cancel()

    async def _work(self, source: Source) -> None:
        while not (self.is_parked or self._refusal) and (place := await source.next()) is not None:
            answer = await self._answer_or_error(source, place)
            self._answers.append(answer)  # to the list of this moment: `_write` puts another one there
            self._has_answers.set()

    async def _answer_or_error(self, source: Source, place: LinePlace) -> LineAnswer:
        """Return an error for a line that cannot be run, whatever the reason: others can."""
        try:
            return await self._answer(source, place)
        except Exception as exc:
            if is_outage(exc):
                raise
            if not self._has_failed_line:
                self._has_failed_line = True
                logger.exception("batch %s: line %d cannot be run", self._batch.id, place.number)
            if not isinstance(exc, GatewayError):
                status = 400 if isinstance(exc, (*lines.UNREADABLE, OverflowError)) else 500
                message = f"this line cannot be run ({type(exc).__name__})"
                exc = GatewayError(status, message, code="invalid_line")
            custom_id = lines.custom_id_of(await source.read(place))
            return answers.bad(place.number, request_id_of(self._batch.id, place.number), custom_id, exc)

    async def _answer(self, source: Source, place: LinePlace) -> LineAnswer:
        """Ask until there is an answer.

        A try counts against the line if another one succeeded meanwhile; a deployment that is away for some
        time fails no line. Between tries a line has no slot, and its text is not in memory.
        """
        request_id = request_id_of(self._batch.id, place.number)
        tries, successes, counted, wait = 0, -1, time.monotonic(), FIRST_WAIT_SECONDS
        while True:
            custom_id, status, answer = await self._ask(source, place, request_id)
            if status not in AGAIN:
                break
            if successes != self._successes or time.monotonic() - counted > AWAY_SECONDS:
                tries, successes, counted = tries + 1, self._successes, time.monotonic()
            if tries >= MOST_TRIES:
                break
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)
        if status != 200:
            return answers.bad(place.number, request_id, custom_id, refused(status, answer))
        self._successes += 1
        return answers.good(place.number, request_id, custom_id, answer)

    async def _ask(self, source: Source, place: LinePlace, request_id: str) -> tuple[str, int, bytes]:
        """Send a line once there is a slot and its key's limits allow it; return id, status and answer.

        The slot is given back while the limits do not allow it. One line of a batch waits at a time: the
        others would ask the same limits.
        """
        batch, tools = self._batch, self._tools
        async with contextlib.AsyncExitStack() as slot:
            async with self._turn:
                while True:
                    await slot.enter_async_context(tools.line_slots.slot(batch.tenant))
                    custom_id, body = lines.request_of(await source.read(place), batch.endpoint)
                    try:
                        headers = await tools.gate.admit(request_id, batch.key_id, batch.endpoint, body)
                        break
                    except GatewayError as exc:
                        if exc.status != 401:
                            return custom_id, exc.status, exc.body()
                        seconds = self._refuse(exc)
                    except NotYet as exc:
                        seconds = min(exc.seconds, LONGEST_WAIT_SECONDS)
                    del body
                    await slot.aclose()
                    self.limited_since = self.limited_since or time.monotonic()
                    await asyncio.sleep(seconds * random.uniform(1.0, 1.25))
            self.limited_since = self._refused_at = None
            return custom_id, *await self._send(request_id, headers, body)

    def _refuse(self, refusal: GatewayError) -> float:
        """Return when to ask again for an invalid key; the second time no line is run any more.

        A gateway may hear of a new key later than the one at which the batch began.
        """
        now = time.monotonic()
        if self._refused_at is None:
            self._refused_at = now
        elif now >= self._refused_at + REFUSED_SECONDS:
            self._refusal = refusal
            self._end_waits()
        return REFUSED_SECONDS

    async def _send(self, request_id: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        batch, tools = self._batch, self._tools
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            client = tools.apis if batch.endpoint in lines.OF_WORKERS else tools.frontend
            answer = await client.post(
                batch.endpoint, content=body, headers={**headers, "content-type": JSON}, timeout=_TIMEOUT
            )
        except httpx.HTTPError as exc:
            return 502, f"the frontend did not answer ({type(exc).__name__})".encode()
        finally:
            self._sending.discard(task)
            tools.gate.ended(request_id)
        return answer.status_code, answer.content

    async def _write(self, part: parts.Part, room: int) -> None:
        """Put answers on the disk and into the database, many at a time, until there are no more."""
        tools, batch_id = self._tools, self._batch.id
        while True:
            is_last = self._is_stopped
            ready, self._answers = self._answers, []
            self._has_answers.clear()
            starts = await asyncio.to_thread(part.append, [answer.text for answer in ready]) if ready else []
            pieces = [
                Answer(answer.number, start, len(answer.text), answer.is_error, answer.tokens)
                for answer, start in zip(ready, starts, strict=True)
            ]
            batch = await tools.database.run(
                lambda t, pieces=pieces: tools.store.add(t, batch_id, self.owner, pieces)  # type: ignore[misc]
            )
            if batch is None:
                raise NotOurs
            self._batch = batch
            if is_last or batch.status == "cancelling" or time.time() > batch.expires:
                return
            if part.size > room:
                raise _StorageFull
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tools.beat_seconds):
                    await self._has_answers.wait()
                    if not self._is_stopped:
                        await asyncio.sleep(GATHER_SECONDS)

    async def _finish(self, failure: Fault | None = None) -> None:
        """Write the files; again if a gateway ended while it did so."""
        tools, store = self._tools, self._tools.store
        batch = await tools.database.run(lambda t: store.finalize(t, self._batch.id, self.owner))
        if batch is None:
            raise NotOurs
        # The owner is part of the names: one that lost the batch cannot write over what another has finished.
        names = [f"file-{batch.id.removeprefix('batch_')}-{self.owner[:8]}-{kind}" for kind in OUTPUTS]
        paths = [tools.files.path(name) for name in names]
        try:
            pieces = await tools.database.run(lambda t: store.answered(t, batch.id))
            status, fault = _ending(batch, len(pieces), self._refusal, failure)
            sizes = await self._in_turn(parts.put_together, self._folder, pieces, *paths)
            unanswered = batch.total - len(pieces) if status == "failed" else 0
            error = self._refusal if status == "completed" else fault
            if error is not None and status != "failed" and batch.started is not None:
                numbers = {piece[0] for piece in pieces}
                line_of = functools.partial(answers.unanswered, batch.id, error)
                unanswered, size = await self._in_turn(
                    parts.add_unanswered, self._input, numbers, paths[1], line_of
                )
                sizes = (sizes[0], size)
        except BaseException:
            _remove(paths)  # a disk that is full has no room for what nobody names
            raise
        outputs = [name if size else None for name, size in zip(names, sizes, strict=True)]
        await self._end(batch, status, unanswered, outputs, sizes, fault)
        _remove(path for path, name in zip(paths, outputs, strict=True) if name is None)
        await asyncio.to_thread(parts.remove, self._folder)

    async def _end(
        self,
        batch: Batch,
        status: str,
        unanswered: int,
        outputs: Sequence[str | None],
        sizes: Sequence[int],
        fault: Fault | None,
    ) -> None:
        store, files = self._tools.store, self._tools.files

        def work(t: Transaction) -> None:
            if not store.end(t, batch, self.owner, status, unanswered, outputs, fault):
                raise NotOurs
            for name, kind, size in zip(outputs, OUTPUTS, sizes, strict=True):
                if name is not None:
                    files.add(t, name, batch.tenant, OUTPUT, f"{batch.id}_{kind}.jsonl", size)

        await self._tools.database.run(work)
        logger.info("batch %s: %s", batch.id, status)

    async def _in_turn(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of work on a whole file, which takes its turn and a thread."""

        async def wait_and_work() -> T:
            async with self._tools.file_slots.slot(self._batch.tenant):
                return await asyncio.to_thread(work, *args, **kwargs)

        return await self._beating(wait_and_work())

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
        batch = await self._tools.database.run(lambda t: store.mine(t, self._batch.id, self.owner))
        if batch is None:
            raise NotOurs
        return batch


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _ending(
    batch: Batch, answered: int, refusal: GatewayError | None, failure: Fault | None
) -> tuple[str, Fault | None]:
    """Return the last state of a batch, and the reason if not all lines have answers or refusals."""
    if failure is not None:
        return "failed", failure
    if batch.status == "cancelling":
        return "cancelled", None
    if batch.started is None or (answered < batch.total and refusal is None):
        return "expired", _late(batch)
    return "completed", None


def _late(batch: Batch) -> Fault:
    message = f"the batch's time ({batch.completion_window}) ended before this line was run"
    return Fault("batch_expired", message, None)
