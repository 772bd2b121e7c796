"""Runs one client process of a load: sends its share of the requests and reports every answer.

`bench load` starts it, sends it orders on standard input, and ends it by closing that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec
import uvloop

from dynamo_vllm.bench.http.stream_client import StreamClient
from dynamo_vllm.bench.load import arrivals, messages
from dynamo_vllm.bench.load.prompts import PATHS, Conversation, as_random

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from dynamo_vllm.bench.http.answers import Answer

T = TypeVar("T")
PROGRESS_SECONDS = 0.25
_OPEN_LOOP_CONNECTIONS = 8
_PREPARED_BYTES = 64 * 2**20
_FAILURE_PAUSE_SECONDS = 0.05
"""The pause after a failure, so that a server which refuses at once does not get thousands of requests."""


class Stage:
    """One client process's part of a stage."""

    def __init__(self, spec: messages.StageSpec, client: StreamClient, part: int, parts: int) -> None:
        self._spec = spec
        self._client = client
        self._part = part
        self._parts = parts
        self._bodies: dict[int, bytes] = {}
        self._stop = asyncio.Event()
        self._late = 0.0
        self.answers: list[Answer] = []
        self.failed = 0
        self.tokens = 0
        self._reported = 0

    async def prepare(self) -> list[str]:
        """Create request bodies, warm up the server and open connections; return errors of the warm-up."""
        spec = self._spec
        if spec.prompts.kind != "turns" and self._count() is not None:
            self._make_bodies()
        slots = len(self._slots()) if spec.concurrency else _OPEN_LOOP_CONNECTIONS
        errors = await self._warm_up(slots)
        with contextlib.suppress(OSError):  # the requests will report it
            await self._client.open(slots)
        return errors

    def _make_bodies(self) -> None:
        size = 0
        for number in self._numbers():
            body = self._bodies[number] = Conversation(self._spec.prompts, number).next_body(())
            size += len(body)
            if size > _PREPARED_BYTES:  # the others are created when they are sent
                break

    async def run(self, begin: float) -> messages.Done:
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        cpu = time.process_time()
        end = begin + self._spec.seconds if self._spec.seconds is not None else float("inf")
        if self._spec.concurrency:
            numbers = self._numbers()
            await asyncio.gather(*(self._slot(numbers, end) for _ in self._slots()))
        else:
            await self._open_loop(begin, end)
        return messages.Done(self.answers, time.process_time() - cpu, self._late)

    def stop(self) -> None:
        self._stop.set()
        self._client.abort()

    def progress(self) -> messages.StageProgress:
        ok = len(self.answers) - self.failed
        new, self._reported = self.answers[self._reported :], len(self.answers)
        return messages.StageProgress(
            ok,
            self.failed,
            self._client.in_flight,
            self.tokens + self._client.events,
            [answer.first - answer.sent for answer in new if answer.first and not answer.error],
        )

    # --- this process's share -----------------------------------------------------------------------------

    def _slots(self) -> list[int]:
        return [slot for slot in range(self._spec.concurrency or 0) if slot % self._parts == self._part]

    def _count(self) -> int | None:
        """Return how many conversations the whole stage has; None if only time limits it."""
        spec = self._spec
        if spec.requests is None:
            return len(spec.prompts.requests) or None
        return -(-spec.requests // (spec.prompts.turns if spec.prompts.kind == "turns" else 1))

    def _numbers(self) -> Iterator[int]:
        """Yield the numbers of this process's conversations, without end if only time limits them."""
        count, width = self._count(), self._spec.concurrency
        for number in itertools.count() if count is None else range(count):
            if (number % width if width else number) % self._parts == self._part:
                yield number

    def _turns(self, number: int, talk: Conversation) -> int:
        """Return the turns of a conversation; the last conversation has only the requests that are left."""
        if self._spec.requests is None:
            return talk.turns
        return min(talk.turns, self._spec.requests - number * talk.turns)

    # --- sending ------------------------------------------------------------------------------------------

    async def _slot(self, numbers: Iterator[int], end: float) -> None:
        while not self._stop.is_set() and time.monotonic() < end:
            number = next(numbers, None)
            if number is None:
                return
            await self._talk(number, end)

    async def _open_loop(self, begin: float, end: float) -> None:
        tasks: set[asyncio.Task[None]] = set()
        for number, due in self._due():
            at = begin + due
            if at >= end:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at - time.monotonic()):
                    await self._stop.wait()
            if self._stop.is_set():
                break
            self._late = max(self._late, time.monotonic() - at)
            task = asyncio.create_task(self._talk(number, end))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)

    def _due(self) -> Iterator[tuple[int, float]]:
        """Yield the number and the time of each conversation of this process."""
        spec = self._spec
        moments: Iterator[float]
        if spec.rate is None:
            moments = (request.at for request in spec.prompts.requests)
        else:
            moments = arrivals.moments(spec.rate, spec.arrivals, f"{spec.prompts.seed}/{spec.name}")
        for number, at in itertools.islice(enumerate(moments), self._count()):
            if number % self._parts == self._part:
                yield number, at

    async def _talk(self, number: int, end: float) -> None:
        talk = Conversation(self._spec.prompts, number)
        said: list[str] = []
        for turn in range(self._turns(number, talk)):
            if self._stop.is_set() or (turn and time.monotonic() >= end):
                return
            body = self._bodies.pop(number, None) or talk.next_body(said)
            answer = await self._client.ask(body, talk.keeps_text)
            said.append(answer.text)
            self._keep(answer)
            if answer.error:
                await asyncio.sleep(_FAILURE_PAUSE_SECONDS)
                return

    def _keep(self, answer: Answer) -> None:
        answer.text = ""
        self.answers.append(answer)
        self.failed += bool(answer.error)
        self.tokens += answer.output_tokens or answer.events

    async def _warm_up(self, slots: int) -> list[str]:
        """Send requests that do not count; return their errors."""
        prompts = self._spec.prompts
        if prompts.kind == "trace":  # the server must not have its prompts in a cache yet
            prompts = as_random(prompts)
        # With fewer requests in flight than processes, the processes without a slot send nothing.
        senders = min(self._parts, self._spec.concurrency or self._parts)
        numbers = iter(range(-1 - self._part, -1 - self._spec.warmup, -senders))
        errors: list[str] = []

        async def send() -> None:
            for number in numbers:
                if self._stop.is_set():
                    return
                answer = await self._client.ask(Conversation(prompts, number).next_body(()))
                if answer.error:
                    errors.append(answer.error)

        await asyncio.gather(*(send() for _ in range(slots)))
        return errors


class Generator:
    """Executes the orders of the bench."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._decoder = msgspec.msgpack.Decoder(messages.Order)
        self._coming: asyncio.Task[messages.Order | None] | None = None

    async def run(self) -> None:
        begin = await self._next()
        if not isinstance(begin, messages.Begin):
            return
        clients: dict[str, StreamClient] = {}
        try:
            while (order := await self._next()) is not None:
                if isinstance(order, messages.Prepare):
                    api = order.stage.prompts.api
                    client = clients.get(api)
                    if client is None:
                        client = clients[api] = StreamClient(begin.target, PATHS[api], begin.timeout)
                    await self._stage(Stage(order.stage, client, begin.part, begin.parts))
        finally:
            for client in clients.values():
                client.close()

    async def _stage(self, stage: Stage) -> None:
        send(messages.Ready(await self._run_until_order(stage, stage.prepare())))
        go = await self._next()
        if not isinstance(go, messages.Go):
            send(messages.Done([], 0.0, 0.0))
            return
        gc.collect()
        gc.disable()  # a collection would show up as a gap between tokens
        try:
            send(await self._run_until_order(stage, stage.run(go.at)))
        finally:
            gc.enable()

    async def _run_until_order(self, stage: Stage, work: Coroutine[object, object, T]) -> T:
        """Run the work and report its progress; an order, or the end of orders, stops the stage."""
        working = asyncio.create_task(work)
        while not working.done():
            order = self._order()
            waited = {working} if order.done() else {working, order}
            await asyncio.wait(waited, timeout=PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if order.done():
                stage.stop()
            send(stage.progress())
        return await working

    def _order(self) -> asyncio.Task[messages.Order | None]:
        """Return the task that reads the next order; it is kept, since cancelling it could lose a message."""
        if self._coming is None:
            self._coming = asyncio.create_task(messages.receive(self._reader, self._decoder))
        return self._coming

    async def _next(self) -> messages.Order | None:
        order = await self._order()
        self._coming = None
        return order


def send(report: messages.Report) -> None:
    """Send a report to the bench."""
    with contextlib.suppress(OSError):  # the bench has ended
        sys.stdout.buffer.write(messages.pack(report))
        sys.stdout.buffer.flush()


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    await Generator(reader).run()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench handles it and sends an order
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(main())
    os._exit(0)
