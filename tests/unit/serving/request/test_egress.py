"""Answers on their way out, with senders that wait as the runtime's does."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from dynamo.llm import HttpError
from dynamo.llm.exceptions import StreamIncomplete

from dynamo_vllm.errors import ClientBehind
from dynamo_vllm.serving.request import full_sockets
from dynamo_vllm.serving.request.egress import CHUNKS, Chunk, Egress, Stream
from harness.fakes import FakeContext, FakeSender, FakeWorker, make_worker, request
from harness.waiting import until_async

PLACES = 3 * CHUNKS
"""Between `send` and a client, as in the runtime."""


class Client:
    """Takes what is sent; while it does not read, there are some places and then `send` waits."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.reads = True
        self.is_gone = False
        self.threads: set[str] = set()
        self._changed = threading.Condition()
        self._waiting = 0

    def send(self, chunk: Chunk) -> None:
        self.threads.add(threading.current_thread().name)
        with self._changed:
            if not self.reads:
                self._waiting += 1
            while not self.reads and self._waiting > PLACES and not self.is_gone:
                assert threading.current_thread() is not threading.main_thread(), "the event loop waits"
                self._changed.wait(30)
            if self.is_gone:
                raise RuntimeError("response stream is closed")
            self.chunks.append(chunk)

    def read(self) -> None:
        with self._changed:
            self.reads, self._waiting = True, 0
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self.is_gone = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing to close."""

    @property
    def is_full(self) -> bool:
        return not self.reads and self._waiting > PLACES // 2


class Clients(list[Client]):
    def full(self) -> int:
        return sum(client.is_full and not client.is_gone for client in self)


@pytest.fixture
def clients() -> Iterator[Clients]:
    made = Clients([Client(), Client()])
    yield made
    for client in made:
        client.leave()


@pytest.fixture
def egress(clients: Clients) -> Egress:
    return Egress(unread_bytes=20_000, full_connections=clients.full)


class Sending:
    """A stream as a request uses it."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.places, self.count = stream, CHUNKS, 0

    def some(self, count: int) -> None:
        for _ in range(count):
            chunk, self.count = {"number": self.count}, self.count + 1
            if self.places:
                self.places -= 1
                self.stream.send(chunk)
            else:
                self.places = self.stream.pass_on(chunk)


def sending(egress: Egress, client: Client, on_closed: Callable[[], None] = lambda: None) -> Sending:
    return Sending(egress.stream(client.send, on_closed))


def numbers(client: Client) -> list[int]:
    return [chunk["number"] for chunk in client.chunks]


async def test_clients_that_read_are_sent_to_without_a_thread(egress: Egress, clients: Clients) -> None:
    both = [sending(egress, client) for client in clients]
    for _ in range(50):
        for one in both:
            one.some(CHUNKS)
    assert all(numbers(client) == list(range(50 * CHUNKS)) for client in clients)
    assert egress.thread is None
    assert egress.looks <= 50, "a look serves all streams"


async def test_client_that_does_not_read_keeps_nobody_waiting(egress: Egress, clients: Clients) -> None:
    stalled, other = (sending(egress, client) for client in clients)
    clients[0].reads = False
    with pytest.raises(ClientBehind):
        while True:
            stalled.some(10)
            other.some(10)
            await asyncio.sleep(0)
    await until_async("one that waits", lambda: egress.waiting == 1)
    await other.stream.sent()
    assert numbers(clients[1]) == list(range(other.count)), "in order"
    clients[1].threads.clear()
    for _ in range(2 * CHUNKS):
        other.some(1)
        await other.stream.sent()
    assert threading.main_thread().name in clients[1].threads, "who waits is known: others need no thread"
    clients[0].leave()
    await until_async("nobody to wait", lambda: egress.waiting == 0)


async def stalled_one(
    egress: Egress, client: Client, on_closed: Callable[[], None] = lambda: None
) -> Sending:
    """A stream that waits for a client that does not read."""
    stream = sending(egress, client, on_closed)
    client.reads = False
    stream.some(PLACES + CHUNKS)
    await until_async("one that waits", lambda: egress.waiting == 1)
    return stream


async def test_client_that_reads_again_has_it_all_in_order(egress: Egress, clients: Clients) -> None:
    late = await stalled_one(egress, clients[0])
    finishing = asyncio.create_task(late.stream.sent())
    await asyncio.sleep(0)
    assert not finishing.done()
    clients[0].read()
    await asyncio.wait_for(finishing, 30)
    late.some(5 * CHUNKS)
    await late.stream.sent()
    assert numbers(clients[0]) == list(range(PLACES + 6 * CHUNKS))
    await until_async("nobody to wait", lambda: egress.waiting == 0)


async def test_client_that_leaves_while_it_is_waited_for(egress: Egress, clients: Clients) -> None:
    left = asyncio.Event()
    stalled = await stalled_one(egress, clients[0], left.set)
    clients[0].leave()
    await asyncio.wait_for(left.wait(), 30)
    await asyncio.wait_for(stalled.stream.sent(), 30)
    await until_async("nobody to wait", lambda: egress.waiting == 0)


async def test_chunk_that_cannot_be_sent_fails_its_own_request(egress: Egress, clients: Clients) -> None:
    def send(chunk: Chunk) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("not encoded")

    broken = Sending(egress.stream(send, lambda: None))
    clients[1].reads = False
    other = sending(egress, clients[1])
    other.some(PLACES)  # a full connection, so that the thread is used
    broken.some(CHUNKS + 1)
    with pytest.raises(ValueError, match="not encoded"):
        await asyncio.wait_for(broken.stream.sent(), 30)
        broken.some(1)


# --- with the request path ------------------------------------------------------------------------------


async def worker_of(clients: Clients, unread_bytes: int = 20_000) -> tuple[FakeWorker, list[str]]:
    worker, counted = await make_worker(context_length=100_000), list[str]()
    egress = Egress(unread_bytes, lambda: counted.append("unread"), clients.full)
    worker.serve(egress=egress)
    return worker, counted


async def ask(worker: FakeWorker, client: Client, name: str, tokens: int) -> None:
    async for _ in worker.service.generate(request(max_tokens=tokens), FakeContext(name), client):
        raise AssertionError("push egress yields nothing")


async def test_request_of_a_client_that_does_not_read_is_ended_and_counted(clients: Clients) -> None:
    # All that the other one may leave unread on a busy machine is less than the limit.
    worker, counted = await worker_of(clients, unread_bytes=1 << 18)
    clients[0].reads = False
    stalled = asyncio.create_task(ask(worker, clients[0], "stalled", 20_000))
    await ask(worker, clients[1], "other", 2_000)
    with pytest.raises(HttpError) as caught:
        await asyncio.wait_for(stalled, 120)
    assert caught.value.code == 408
    await until_async("its end", lambda: not worker.engine.running and len(worker.in_flight) == 0)
    assert counted == ["unread"] and len(clients[1].chunks) == 2_000


async def test_drain_does_not_wait_for_a_client_that_does_not_read(clients: Clients) -> None:
    worker, counted = await worker_of(clients, unread_bytes=1 << 20)
    clients[0].reads = False
    stalled = asyncio.create_task(ask(worker, clients[0], "stalled", PLACES + CHUNKS))
    await until_async("the abort", lambda: not worker.engine.running and len(worker.in_flight) == 1)
    assert not stalled.done(), "its last chunks are not sent"
    worker.in_flight.abort_all()
    with pytest.raises(StreamIncomplete):
        await asyncio.wait_for(stalled, 120)
    assert counted == [] and len(worker.in_flight) == 0


async def test_usual_sender_is_never_looked_at() -> None:
    """Answers of a few chunks fit whatever the client does."""
    worker = await make_worker()
    sender = await worker.generate(request(max_tokens=CHUNKS), sender=FakeSender())
    assert len(sender.chunks) == CHUNKS and worker.service._egress.looks == 0


# --- what the kernel says -------------------------------------------------------------------------------


def test_full_connections_are_counted() -> None:
    before = full_sockets.count_full()
    with socket.socket() as listener, socket.socket() as sender:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender.connect(listener.getsockname())
        with listener.accept()[0] as reader:
            sender.send(bytes(100))
            assert full_sockets.count_full() == before
            sender.setblocking(False)
            sent = 100
            with pytest.raises(BlockingIOError):
                while True:
                    sent += sender.send(bytes(5000))
            assert full_sockets.count_full() == before + 1
            reader.settimeout(30)
            while sent:
                sent -= len(reader.recv(1 << 20))
            assert full_sockets.count_full() == before


def test_room_is_not_counted_on_without_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        assert full_sockets.count_full() == full_sockets.UNKNOWN
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
