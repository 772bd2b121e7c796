"""Reads the runtime's record of an ended request (1.6.1: `request_end` of its request trace)."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from dynamo_vllm.console.decisions.shapes import Worker

LONGEST_ID = 200
MOST_BLOCKS = 200_000
_MS = 1000.0


class Unreadable(Exception):
    """This is not such a record."""


class _Workers(msgspec.Struct):
    prefill_worker_id: int | None = None
    prefill_dp_rank: int | None = None
    decode_worker_id: int | None = None
    decode_dp_rank: int | None = None


class _Replay(msgspec.Struct):
    trace_block_size: int = 0
    input_sequence_hashes: list[int] = []


class _Request(msgspec.Struct):
    request_id: str
    request_received_ms: float
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    prefill_wait_time_ms: float = 0.0
    prefill_time_ms: float | None = None
    ttft_ms: float | None = None
    total_time_ms: float = 0.0
    kv_hit_rate: float | None = None
    queue_depth: int | None = None
    kv_transfer_estimated_latency_ms: float | None = None
    worker: _Workers = msgspec.field(default_factory=_Workers)
    replay: _Replay = msgspec.field(default_factory=_Replay)


class _Record(msgspec.Struct):
    request: _Request


_records = msgspec.json.Decoder(_Record)


class Ended(NamedTuple):
    """One ended request. Times are seconds of the frontend's clock."""

    id: str
    received: float
    routed: float
    first_token: float | None
    ended: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """What the router took for cached; the engine may have found more or less."""
    counted_blocks: float | None
    """The same in blocks, with the router's weights of tiers; None without a KV router."""
    transfer_seconds: float | None
    """From the prefill worker's token, which is the first, to the first of the decode worker."""
    worker: Worker | None
    prefill_worker: Worker | None
    """None if one worker did both. After a migration both name the first worker, which is gone."""
    block_size: int
    blocks: tuple[int, ...]
    """The sequence hashes of the prompt's whole blocks."""


def read(data: bytes) -> Ended:
    """Raise Unreadable for anything else."""
    try:
        found = _records.decode(data).request
    except msgspec.DecodeError as exc:
        raise Unreadable(str(exc)) from None
    if len(found.request_id) > LONGEST_ID or len(found.replay.input_sequence_hashes) > MOST_BLOCKS:
        raise Unreadable("its id or its prompt is too long")
    workers, size = found.worker, found.replay.trace_block_size
    decode = _worker(workers.decode_worker_id, workers.decode_dp_rank)
    prefill = _worker(workers.prefill_worker_id, workers.prefill_dp_rank)
    received = found.request_received_ms / _MS
    whole = found.input_tokens // size if size else 0
    rate = found.kv_hit_rate
    return Ended(
        found.request_id,
        received,
        received + found.prefill_wait_time_ms / _MS,
        None if found.ttft_ms is None else received + found.ttft_ms / _MS,
        received + found.total_time_ms / _MS,
        found.input_tokens,
        found.output_tokens,
        found.cached_tokens,
        None if rate is None or not size else rate * -(-found.input_tokens // size),
        _seconds(found.kv_transfer_estimated_latency_ms),
        decode or prefill,
        prefill if decode and prefill != decode else None,
        size,
        tuple(found.replay.input_sequence_hashes[:whole]),
    )


def _worker(instance: int | None, rank: int | None) -> Worker | None:
    return None if instance is None else Worker(instance, rank or 0)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / _MS
