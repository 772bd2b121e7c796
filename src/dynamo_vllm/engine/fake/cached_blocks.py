"""Announces cached blocks in KV events, as vLLM does, to measure a router that knows many of them.

vLLM publishes its events over ZeroMQ. This speaks as much of that protocol (ZMTP 3.0) as one subscriber
needs: the fake engine then needs no ZeroMQ, and it sends only as fast as the subscriber reads.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_vllm.engine.fake.spec import CachedBlocks

BLOCKS_PER_SEQUENCE = 64
SEQUENCES_PER_BATCH = 16
PROMPT_TOKENS = 512
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
_MORE, _LONG, _COMMAND = 1, 2, 4


class BlockAnnouncer:
    """A server that sends every subscriber the events of all cached blocks, once."""

    def __init__(self, cached: Sequence[CachedBlocks], block_size: int) -> None:
        self._cached = cached
        self._block_size = block_size
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        """Listens, and returns the address."""
        self._server = await asyncio.start_server(self._announce, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"tcp://{host}:{port}"

    async def _announce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await _subscribed(reader, writer)
            for number, batch in enumerate(batches(self._cached, self._block_size)):
                writer.writelines(_frames(b"", number.to_bytes(8, "big"), batch))
                await writer.drain()
                await asyncio.sleep(0)  # drain alone may never let others run
            await reader.read()  # until the subscriber closes
        except (OSError, asyncio.IncompleteReadError):
            pass  # it has closed
        finally:
            self._writers.discard(writer)
            writer.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()


async def _subscribed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Does the handshake, and waits for the subscription: what is published before it would be lost."""
    writer.write(_GREETING)
    await reader.readexactly(len(_GREETING))
    writer.write(bytes([_COMMAND, len(_READY)]) + _READY)
    for _ in ("READY", "the subscription"):
        flags, *_ = await reader.readexactly(1)
        length = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1), "big")
        await reader.readexactly(length)


def _frames(*parts: bytes) -> Iterator[bytes]:
    """Yields one message of several parts."""
    for at, part in enumerate(parts):
        flags = _LONG | (_MORE if at < len(parts) - 1 else 0)
        yield bytes([flags]) + len(part).to_bytes(8, "big")
        yield part


def batches(cached: Sequence[CachedBlocks], block_size: int) -> Iterator[bytes]:
    """Yields batches of events, each event for the blocks of one sequence."""
    events = []
    for event in (event for blocks in cached for event in _events(blocks, block_size)):
        events.append(event)
        if len(events) == SEQUENCES_PER_BATCH:
            yield _batch(events)
            events.clear()
    if events:
        yield _batch(events)


def _batch(events: list[list[object]]) -> bytes:
    return msgspec.msgpack.encode([time.time(), events, 0])


def _events(cached: CachedBlocks, block_size: int) -> Iterator[list[object]]:
    """Yields vLLM's BlockStored: tag, block hashes, parent, token ids, block size, adapter, medium.

    BlockRemoved has the tag, the hashes and the medium. The hash of a block depends on its sequence only, so
    that the same sequence has the same hashes in every medium.
    """
    for at, first in enumerate(range(0, cached.count, BLOCKS_PER_SEQUENCE)):
        blocks = min(BLOCKS_PER_SEQUENCE, cached.count - first)
        start = (cached.first + at * cached.step) * BLOCKS_PER_SEQUENCE
        hashes = list(range(start, start + blocks))
        if cached.removed:
            yield ["BlockRemoved", hashes, cached.medium]
            continue
        ids = sequence(cached, at, blocks * block_size)
        yield ["BlockStored", hashes, None, ids, block_size, None, cached.medium]


def sequence(cached: CachedBlocks, at: int, tokens: int) -> list[int]:
    """Returns the ids of a cached sequence. The first are those of a random prompt of `bench load`."""
    made = random.Random(f"{cached.seed}/{cached.first + at * cached.step}")
    first = made.choices(range(*cached.vocab), k=min(tokens, PROMPT_TOKENS))
    return [*first, *made.randbytes(tokens - len(first))]  # choices would take 6 s for a million blocks
