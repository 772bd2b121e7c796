"""The blocks that a fake engine announces, as vLLM's own client would read them."""

from __future__ import annotations

import asyncio

import msgspec
import zmq
import zmq.asyncio

from dynamo_vllm.engine.fake.cached_blocks import BLOCKS_PER_SEQUENCE, batches
from dynamo_vllm.engine.fake.launch import launch
from dynamo_vllm.engine.fake.spec import CachedBlocks, FakeSpec

BLOCK = 4


def stored(batch: bytes) -> list[list[object]]:
    _, events, rank = msgspec.msgpack.decode(batch)
    assert rank == 0
    return list(events)


def test_every_block_is_announced_once_in_events_of_one_sequence() -> None:
    cached = CachedBlocks(count=20 * BLOCKS_PER_SEQUENCE + 3)
    events = [event for batch in batches([cached], BLOCK) for event in stored(batch)]
    assert len(events) == 21
    hashes = [block for event in events for block in event[1]]  # type: ignore[attr-defined]
    assert hashes == list(range(cached.count))
    for tag, blocks, parent, ids, size, *_ in events:
        assert (tag, parent, size) == ("BlockStored", None, BLOCK)
        assert len(ids) == BLOCK * len(blocks)  # type: ignore[arg-type]


def test_engines_with_another_first_sequence_have_other_blocks() -> None:
    one, other = (
        stored(next(batches([CachedBlocks(count=128, first=first, step=2)], BLOCK))) for first in (0, 1)
    )
    assert all(event[3] != another[3] for event in one for another in other)
    assert {tuple(event[1]) for event in one}.isdisjoint({tuple(event[1]) for event in other})  # type: ignore[arg-type]


def test_block_has_the_same_hash_in_every_medium() -> None:
    kept = CachedBlocks(count=3, medium="CPU")
    gone = CachedBlocks(count=3, removed=True)
    (batch,) = batches([CachedBlocks(count=3), kept, gone], BLOCK)
    assert [(event[0], event[1], event[-1]) for event in stored(batch)] == [
        ("BlockStored", [0, 1, 2], "GPU"),
        ("BlockStored", [0, 1, 2], "CPU"),
        ("BlockRemoved", [0, 1, 2], "GPU"),
    ]


async def test_a_subscriber_of_the_real_library_gets_all_batches() -> None:
    spec = FakeSpec(cached=(CachedBlocks(count=50 * BLOCKS_PER_SEQUENCE),), block_size=BLOCK)
    engine = await launch(spec, lambda figures: None, lambda phase: None)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as reader:
        reader.connect(engine.facts.kv_event_endpoints[0])
        reader.subscribe(b"")
        got: list[list[bytes]] = []
        async with asyncio.timeout(30):
            while sum(len(stored(batch)) for _, _, batch in got) < 50:
                got.append(await reader.recv_multipart())
    assert [int.from_bytes(number, "big") for _, number, _ in got] == list(range(len(got)))
    assert {topic for topic, _, _ in got} == {b""}
    await engine.close()


async def test_engine_without_cached_blocks_publishes_nothing() -> None:
    engine = await launch(FakeSpec(), lambda figures: None, lambda phase: None)
    assert engine.facts.kv_event_endpoints == {}
    await engine.close()
