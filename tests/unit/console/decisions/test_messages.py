"""Event messages, as runtime 1.6.1 sent them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dynamo_vllm.console.decisions import messages
from dynamo_vllm.console.decisions.block_map import BlockMap
from dynamo_vllm.console.decisions.messages import Booking, Unreadable
from dynamo_vllm.console.decisions.shapes import Overlap, Worker
from dynamo_vllm.console.decisions.snapshots import apply
from dynamo_vllm.serving.watch.block_hashes import chain

RECORDED = Path(__file__).parent / "recorded"


def frames(name: str) -> list[bytes]:
    return msgspec.msgpack.decode((RECORDED / f"{name}.msgpack").read_bytes(), type=list[bytes])


def active() -> list[list[bytes]]:
    return msgspec.msgpack.decode(
        (RECORDED / "active_sequences_events.msgpack").read_bytes(), type=list[list[bytes]]
    )


def test_bookings_are_read() -> None:
    envelopes = [messages.read_envelope(one) for one in active()]
    assert [one.sequence for one in envelopes] == [0, 1, 2]
    events = [event for one in envelopes for event in messages.active_events(one)]
    first = events[0].data
    assert isinstance(first, Booking)
    assert first.AddRequest.prefill_load_hint is not None
    assert first.AddRequest.prefill_load_hint.initial_effective_prefill_tokens == 1
    assert [event.data for event in events[1:]] == ["MarkPrefillCompleted", "Free"]
    assert len({event.request_id for event in events}) == 1


def test_blocks_of_workers_meet_those_of_requests() -> None:
    """Both were recorded in one run: the request's prompt begins with a cached sequence."""
    envelope = messages.read_envelope(frames("kv_events"))
    assert (envelope.topic, envelope.sequence) == (messages.KV_EVENTS, 0)
    blocks = BlockMap(chain)
    for event in messages.kv_events(envelope):
        worker = Worker(event.worker_id, event.event.dp_rank)
        assert apply(blocks, worker, event, 1.0)
    booked = messages.active_events(messages.read_envelope(active()[0]))[0].data
    assert isinstance(booked, Booking)
    assert booked.AddRequest.token_sequence is not None
    assert blocks.overlaps(booked.AddRequest.token_sequence) == {worker: Overlap(8)}


def test_other_messages_and_payloads_of_another_version_are_refused() -> None:
    for parts in ([], [b""], [b"a", b"b", b"c", b"\x02\0\0\0\0"], [b"a", b"b", b"c", b"\x01\0\0\0\x01\xc1"]):
        with pytest.raises(Unreadable):
            messages.read_envelope(parts)
    envelope = messages.read_envelope(frames("kv_events"))
    for read in (messages.active_events, messages.kv_events):
        with pytest.raises(Unreadable):
            read(msgspec.structs.replace(envelope, payload=b"\xc1"))
    with pytest.raises(Unreadable):
        messages.snapshot_events(b"{}")
