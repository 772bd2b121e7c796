"""Sends the console what a busy deployment sends it: records of ended requests, and KV events.

Records go to its receiver in batches, as a frontend's exporter sends them; events go over ZeroMQ, as the
runtime's publishers send them.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import zmq

from dynamo_vllm.console.decisions import otlp
from dynamo_vllm.console.decisions.messages import (
    KV_EVENTS,
    Block,
    Change,
    Envelope,
    Event,
    Removed,
    Stored,
    WorkerEvent,
)
from dynamo_vllm.serving.watch import block_hashes

BLOCK = 32
"""Tokens."""
DOCUMENTS, DOCUMENT_BLOCKS = 400, 64
"""What prompts begin with, and workers have in their caches."""
KEPT = 40
"""Documents in one worker's cache; then the next replaces the oldest."""
RUN = 8
"""Blocks in one event."""
RECORDS_SECONDS, EVENTS_SECONDS = 0.5, 0.1
HIGH_WATER = 20_000


class Beat:
    """Calls `step` every so many seconds while it is entered; after a delay it catches up."""

    def __init__(self, seconds: float, step: Callable[[], None]) -> None:
        self._seconds, self._step = seconds, step
        self._is_over = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Beat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._is_over.wait(max(0.0, due - time.monotonic())):
                self._step()
                due += self._seconds
        except Exception as exc:
            self.failure = exc


class Documents:
    """The hashes of the documents' blocks: each block's own, and the sequence's up to it."""

    def __init__(self, seed: int = 1) -> None:
        made = random.Random(seed)
        self.own = [[made.getrandbits(64) for _ in range(DOCUMENT_BLOCKS)] for _ in range(DOCUMENTS)]
        self.sequences = [sequence(own) for own in self.own]


def sequence(own: Sequence[int]) -> list[int]:
    found = [own[0]]
    for block in own[1:]:
        found.append(block_hashes.chain(found[-1], block))
    return found


class Records:
    """Records of ended requests, spread over all workers."""

    def __init__(
        self, url: str, workers: Sequence[int], documents: Documents, per_second: float, seed: int = 2
    ) -> None:
        self._url, self._workers, self._documents = url, workers, documents
        self._count = round(per_second * RECORDS_SECONDS)
        self._made = random.Random(seed)
        self._client = httpx.Client(timeout=30)
        self.sent = 0

    def send(self) -> None:
        body = export([self._record() for _ in range(self._count)])
        self._client.post(self._url, content=body).raise_for_status()
        self.sent += self._count

    def _record(self) -> bytes:
        made, worker = self._made, self._made.choice(self._workers)
        total, first = made.uniform(200, 4000), made.uniform(20, 200)
        shared = made.randrange(DOCUMENT_BLOCKS)
        document = self._documents.sequences[made.randrange(DOCUMENTS)]
        blocks = [*document[:shared], *(made.getrandbits(64) for _ in range(4))]
        request = {
            "request_id": f"{made.getrandbits(128):032x}",
            "request_received_ms": time.time() * 1000 - total,
            "input_tokens": len(blocks) * BLOCK + 7,
            "output_tokens": made.randrange(20, 400),
            "cached_tokens": shared * BLOCK,
            "prefill_wait_time_ms": made.uniform(0, 5),
            "prefill_time_ms": first,
            "ttft_ms": first,
            "total_time_ms": total,
            "kv_hit_rate": shared / (len(blocks) + 1),
            "queue_depth": 0,
            "worker": {"decode_worker_id": worker, "decode_dp_rank": 0},
            "replay": {"trace_block_size": BLOCK, "input_sequence_hashes": blocks},
        }
        return json.dumps({"event_type": "request_end", "request": request}).encode()


class OneChange(Change, omit_defaults=True):
    """As the runtime encodes it."""


class NumberedEvent(Event, kw_only=True):
    """Routers ask for what they miss between two numbers."""

    event_id: int = 0


class Events:
    """Documents that come into the caches of workers, and replace others there."""

    def __init__(self, documents: Documents, per_second: float, seed: int = 3) -> None:
        self._documents = documents
        self._due, self._each = 0.0, per_second * EVENTS_SECONDS / RUN
        self._made = random.Random(seed)
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._numbers: dict[int, int] = {}
        self._steps: list[tuple[int, Any]] = []
        self.sent = 0

    def open(self, publisher: int) -> str:
        """Return the address of a publisher's channel; each worker has its own."""
        made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        made.setsockopt(zmq.SNDHWM, HIGH_WATER)
        made.setsockopt(zmq.LINGER, 0)
        self._sockets[publisher] = made
        return f"tcp://127.0.0.1:{made.bind_to_random_port('tcp://127.0.0.1')}"

    def begin(self, publishers: Mapping[int, int]) -> None:
        """Speak for these workers, each with its publisher."""
        self._numbers = dict.fromkeys(publishers.values(), 0)
        self._steps = [(publisher, self._of(worker)) for worker, publisher in publishers.items()]

    def send(self) -> None:
        self._due += self._each
        while self._due >= 1:
            self._due -= 1
            publisher, changes = self._made.choice(self._steps)
            self._publish(publisher, next(changes))
            self.sent += RUN

    def _of(self, worker: int) -> Any:
        kept: deque[int] = deque()
        while True:
            one = self._made.randrange(DOCUMENTS)
            if one in kept:
                continue
            kept.append(one)
            own, sequences = self._documents.own[one], self._documents.sequences[one]
            for at in range(0, DOCUMENT_BLOCKS, RUN):
                pairs = zip(sequences[at : at + RUN], own[at : at + RUN], strict=True)
                stored = Stored([Block(*pair) for pair in pairs], sequences[at - 1] if at else None)
                yield WorkerEvent(worker, Event(OneChange(stored=stored)))
            if len(kept) > KEPT:
                old = self._documents.sequences[kept.popleft()]
                for at in range(DOCUMENT_BLOCKS - RUN, -1, -RUN):
                    yield WorkerEvent(worker, Event(OneChange(removed=Removed(old[at : at + RUN]))))

    def _publish(self, publisher: int, event: WorkerEvent) -> None:
        number = self._numbers[publisher]
        self._numbers[publisher] = number + 1
        event.event = NumberedEvent(event.event.data, event_id=number + 1)
        payload = msgspec.msgpack.encode([event])
        said = Envelope(publisher, number, int(time.time() * 1000), KV_EVENTS, payload)
        body = msgspec.msgpack.encode(said)
        head = b"\x01" + len(body).to_bytes(4, "big")
        about = [KV_EVENTS.encode(), publisher.to_bytes(8, "big"), number.to_bytes(8, "big")]
        self._sockets[publisher].send_multipart([*about, head + body])

    def close(self) -> None:
        for one in self._sockets.values():
            one.close()


def export(payloads: Sequence[bytes]) -> bytes:
    """Return an ExportLogsServiceRequest of OpenTelemetry with these payloads."""
    logs = [
        _field(2, _field(6, _field(1, b"payload") + _field(2, _field(1, payload)))) for payload in payloads
    ]
    scope = _field(1, _field(1, otlp.SCOPE))
    return _field(1, _field(2, scope + b"".join(logs)))


def _field(number: int, content: bytes) -> bytes:
    size, length = bytearray(), len(content)
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    size.append(length)
    return bytes([number << 3 | 2, *size]) + content
