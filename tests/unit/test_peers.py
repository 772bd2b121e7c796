"""Whether a request may have moved here from another worker."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from dynamo_vllm.serving.peers import LATE_SECONDS, MEMORY_SECONDS, Peer, Peers


@dataclass
class Transport:
    address: str
    kind: str = "tcp"


@dataclass
class Instance:
    instance_id: int
    transport: Transport


class OtherWorker:
    """Listens as a worker's request plane does; `end` is its process going away."""

    async def __aenter__(self) -> OtherWorker:
        self.writers: list[asyncio.StreamWriter] = []
        self.server = await asyncio.start_server(self._hold, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.instance = Instance(2, Transport(f"127.0.0.1:{port}/abc/ns.comp.ep"))
        return self

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        await reader.read()

    async def end(self) -> None:
        self.server.close()
        for writer in self.writers:
            writer.close()
            await writer.wait_closed()

    async def __aexit__(self, *_: object) -> None:
        await self.end()


async def test_alone_nothing_can_have_moved() -> None:
    peers = Peers(1, lambda: [Instance(1, Transport("127.0.0.1:1/x"))])
    await peers.look()
    assert not peers.may_have_moved(time.monotonic())
    assert peers.known == {}


async def test_a_withdrawn_worker_may_send_its_requests_and_a_new_one_not() -> None:
    async with OtherWorker() as other:
        there = [other.instance]
        peers = Peers(1, lambda: there)
        await peers.look()
        assert not peers.may_have_moved(time.monotonic())
        there.clear()
        await peers.look()
        assert peers.may_have_moved(time.monotonic())
        there.append(other.instance)
        await peers.look()
        assert not peers.may_have_moved(time.monotonic())
        while not other.writers:
            await asyncio.sleep(0)
        peers.close()


async def test_an_ended_process_is_seen_without_discovery() -> None:
    async with OtherWorker() as other:
        peers = Peers(1, lambda: [other.instance])
        await peers.look()
        while not other.writers:
            await asyncio.sleep(0)
        await other.end()
        while peers.known[2].lost_at is None:
            await asyncio.sleep(0)
        assert peers.may_have_moved(time.monotonic())


async def test_a_worker_that_cannot_be_reached_counts_as_gone() -> None:
    peers = Peers(1, lambda: [Instance(2, Transport("127.0.0.1:1/x"))])
    await peers.look()
    assert peers.may_have_moved(time.monotonic())


@pytest.mark.parametrize(
    ("peer", "start", "moved"),
    [
        (Peer(), 100.0, False),
        (Peer(lost_at=100.0), 100.1, True),
        (Peer(lost_at=100.0), 100.0 - LATE_SECONDS / 2, True),
        (Peer(lost_at=100.0), 90.0, False),
        (Peer(lost_at=100.0), 101.0 + MEMORY_SECONDS, False),
        (Peer(withdrawn_at=100.0), 110.0, True),
        (Peer(withdrawn_at=100.0, lost_at=140.0), 139.0, True),
    ],
)
def test_window(peer: Peer, start: float, moved: bool) -> None:
    assert peer.may_have_sent(start) is moved
