"""Reads the runtime's event messages: KV events of workers, and requests that frontends book and free.

A message has four frames: topic, publisher, sequence, and an envelope in MessagePack after a byte of version
and four of length. The envelope's payload is MessagePack again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.console.decisions.shapes import DEVICE, DISK, HOST
from dynamo_vllm.errors import DynamoVllmError

if TYPE_CHECKING:
    from collections.abc import Sequence

KV_EVENTS, ACTIVE = "kv-events", "active_sequences_events"
TIER_NAMES = {"device": DEVICE, "host_pinned": HOST, "disk": DISK}
_HEAD, _VERSION = 5, 1


class Unreadable(DynamoVllmError):
    """This is not a message of the runtime's version 1."""


class Block(msgspec.Struct, gc=False):
    block_hash: int
    tokens_hash: int


class Stored(msgspec.Struct, gc=False):
    blocks: list[Block]
    parent_hash: int | None = None


class Removed(msgspec.Struct, gc=False):
    block_hashes: list[int]


class Change(msgspec.Struct, gc=False):
    stored: Stored | None = None
    removed: Removed | None = None


class Event(msgspec.Struct, gc=False):
    data: Change | str
    """A word is "cleared"."""
    dp_rank: int = 0


class WorkerEvent(msgspec.Struct, gc=False):
    worker_id: int
    event: Event
    storage_tier: str = "device"


class Hint(msgspec.Struct):
    initial_effective_prefill_tokens: int = 0


class AddRequest(msgspec.Struct):
    token_sequence: list[int] | None = None
    """The whole blocks of the prompt; none at a prefill worker."""
    track_prefill_tokens: bool = True
    prefill_load_hint: Hint | None = None


class Booking(msgspec.Struct):
    AddRequest: AddRequest


class Place(msgspec.Struct):
    worker_id: int
    dp_rank: int = 0


class ActiveEvent(msgspec.Struct):
    request_id: str
    worker: Place
    data: Booking | str
    """A word is "MarkPrefillCompleted" or "Free"."""
    lora_name: str | None = None


class ActiveEvents(msgspec.Struct):
    events: list[ActiveEvent]


class Envelope(msgspec.Struct):
    publisher_id: int
    sequence: int
    published_at: int
    """Milliseconds of the publisher's clock."""
    topic: str
    payload: bytes


_envelopes = msgspec.msgpack.Decoder(Envelope)
_kv = msgspec.msgpack.Decoder(list[WorkerEvent])
_active = msgspec.msgpack.Decoder(ActiveEvents)
_snapshots = msgspec.json.Decoder(list[WorkerEvent])


def read_envelope(frames: Sequence[bytes]) -> Envelope:
    """Raise Unreadable for anything else."""
    body = frames[-1] if len(frames) == 4 else b""
    if len(body) < _HEAD or body[0] != _VERSION or int.from_bytes(body[1:_HEAD], "big") != len(body) - _HEAD:
        raise Unreadable(f"a message of {len(frames)} frames, {len(body)} bytes in the last")
    try:
        return _envelopes.decode(memoryview(body)[_HEAD:])
    except msgspec.DecodeError as exc:
        raise Unreadable(str(exc)) from None


def kv_events(envelope: Envelope) -> list[WorkerEvent]:
    try:
        return _kv.decode(envelope.payload)
    except msgspec.DecodeError as exc:
        raise Unreadable(str(exc)) from None


def active_events(envelope: Envelope) -> list[ActiveEvent]:
    try:
        return _active.decode(envelope.payload).events
    except msgspec.DecodeError as exc:
        raise Unreadable(str(exc)) from None


def snapshot_events(dump: bytes) -> list[WorkerEvent]:
    """Read the snapshot of a router, which is JSON."""
    try:
        return _snapshots.decode(dump)
    except msgspec.DecodeError as exc:
        raise Unreadable(str(exc)) from None
