"""Tests how messages of event channels are read: in slices, or all for somebody who must know of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from dynamo_vllm.console.decisions import events
from dynamo_vllm.console.decisions.events import EventFeed
from dynamo_vllm.console.decisions.messages import KV_EVENTS, Envelope


def frames(number: int) -> list[bytes]:
    body = msgspec.msgpack.encode(Envelope(7, number, 0, KV_EVENTS, b""))
    return [KV_EVENTS.encode(), b"", b"", b"\x01" + len(body).to_bytes(4, "big") + body]


async def test_slice_ends_early_and_who_must_know_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SLICE_SECONDS", 0.0)
    waiting: Iterator[list[bytes]] = map(frames, range(50))
    taken: list[int] = []

    def receive() -> list[bytes]:
        try:
            return next(waiting)
        except StopIteration:
            raise zmq.Again from None

    feed = EventFeed(lambda envelope, is_gap: taken.append(envelope.sequence))
    try:
        monkeypatch.setattr(feed, "_receive", receive)
        feed._read(events.SLICE_SECONDS)
        assert taken == [0]
        feed.catch_up()
        assert taken == list(range(50))
    finally:
        feed.close()
