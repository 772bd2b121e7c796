"""Sends answers to the frontend without letting a client that does not read block others (backpressure).

The runtime's `send` blocks while its client does not read. It runs on the event loop, so all requests would
wait. It has no non-blocking form and does not report free space. But it buffers some chunks, which a task of
the runtime writes to the client's connection; the buffer is full only if that connection accepts nothing
more. So a stream sends as many chunks as surely fit, then checks the connections (one check serves all
streams) and sends as many again. Only while a connection is full do chunks go through a thread, which may
block; a stream that blocks the thread keeps it, and another thread serves the rest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.errors import ClientBehind
from dynamo_vllm.serving.request.full_sockets import count_full

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
CHUNKS = 64
"""Chunks that a stream sends between two checks. The runtime (1.6.1) buffers about 190; a check made for
another stream may be as many chunks old."""
PATIENCE_SECONDS = 0.02
"""A thread that sends one chunk for longer belongs to that client, and another one takes over."""
UNREAD_BYTES = 4 << 20
_BESIDE = 64
"""Overhead in bytes of a buffered chunk."""
Chunk = dict[str, Any]


class Egress:
    """The streams of one worker."""

    def __init__(
        self,
        unread_bytes: int = UNREAD_BYTES,
        on_behind: Callable[[], None] = lambda: None,
        full_connections: Callable[[], int] = count_full,
    ) -> None:
        self.unread_bytes = unread_bytes
        self.on_behind = on_behind
        self.lock = threading.Lock()
        self.line: SimpleQueue[Stream] = SimpleQueue()
        """Streams whose chunks wait for the thread."""
        self.thread: Thread | None = None
        self.waiting = 0
        """Threads that each wait for one client."""
        self.looks = 0
        self._has_room = True
        self._full_connections = full_connections
        self._watch: asyncio.TimerHandle | None = None

    def stream(self, send: Callable[[Chunk], None], on_closed: Callable[[], None]) -> Stream:
        """Open a stream for one request; `on_closed` is called when nobody reads its answer any more."""
        return Stream(self, send, on_closed)

    def has_room(self, look: int) -> bool:
        """Return whether all connections accept more, except those with their own threads; newer than the
        given check."""
        if look == self.looks:
            self.looks += 1
            self._has_room = self._full_connections() <= self.waiting
        return self._has_room

    def enqueue(self, stream: Stream) -> None:
        if self.thread is None:
            self.thread = Thread(self)
        self.line.put(stream)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._look_after_thread)

    def _look_after_thread(self) -> None:
        """Start another thread if the current one waits for a client."""
        self._watch = None
        with self.lock:
            thread = self.thread
            if thread is None or (thread.stream is None and self.line.empty()):
                return
            if thread.stream is not None and time.monotonic() - thread.busy_since > PATIENCE_SECONDS:
                self.waiting += 1
                thread.stream.is_waited_for = True
                self.thread = Thread(self)
        self._watch = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._look_after_thread)


class Thread:
    """Send a chunk of each stream in turn, until one blocks."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress
        self.stream: Stream | None = None
        """The stream that it is sending."""
        self.busy_since = 0.0
        threading.Thread(target=self._run, daemon=True, name="egress").start()

    def _run(self) -> None:
        egress = self._egress
        while True:
            stream = egress.line.get()
            self.busy_since, self.stream = time.monotonic(), stream
            has_more = stream.send_next()
            with egress.lock:
                self.stream, has_waited = None, egress.thread is not self
                if has_waited:
                    stream.is_waited_for = False
                    egress.waiting -= 1
            if has_more:
                egress.line.put(stream)
            if has_waited:
                return


class Stream:
    """One outgoing answer; everything but `send_next` runs on the event loop."""

    def __init__(self, egress: Egress, send: Callable[[Chunk], None], on_closed: Callable[[], None]) -> None:
        self.send = send
        """Send with the runtime directly, while the buffer has room."""
        self._egress = egress
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._look = egress.looks
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._is_in_line = False
        self.is_waited_for = False
        """Send through a thread."""
        self._since_look = 0
        self._failure: Exception | None = None
        self._sent_all: asyncio.Future[None] | None = None

    def pass_on(self, chunk: Chunk) -> int:
        """Send a chunk that may not fit; return how many may follow directly."""
        if self._failure is not None:
            raise self._failure
        if not self._is_in_line and self._may_send():
            self.send(chunk)
            return CHUNKS - 1
        self._keep(chunk)
        return 0

    def _may_send(self) -> bool:
        """Check once per so many chunks, also if there was no room."""
        if self._since_look % CHUNKS:
            self._since_look += 1
            return False
        self._since_look = 0
        has_room = self._egress.has_room(self._look)
        self._look = self._egress.looks
        self._since_look += not has_room
        return has_room

    def _keep(self, chunk: Chunk) -> None:
        egress, kept = self._egress, msgspec.msgpack.encode(chunk)
        with egress.lock:
            if self.is_waited_for and self._kept_bytes > egress.unread_bytes:
                self._forget()
                egress.on_behind()
                raise ClientBehind(f"the client has more than {egress.unread_bytes} unread bytes")
            self._kept.append(kept)
            self._kept_bytes += len(kept) + _BESIDE
            is_in_line, self._is_in_line = self._is_in_line, True
        if not is_in_line:
            egress.enqueue(self)

    def _forget(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    async def sent(self) -> None:
        """Return when the runtime has every chunk."""
        with self._egress.lock:
            if not self._is_in_line:
                return
            self._sent_all = self._loop.create_future()
        await self._sent_all
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Drop the buffered chunks; does nothing after a normal end."""
        with self._egress.lock:
            self._forget()

    def send_next(self) -> bool:
        """Runs in a thread and may block for the client. Returns whether there is more to send."""
        with self._egress.lock:
            chunk = self._kept.popleft() if self._kept else None
            self._kept_bytes -= 0 if chunk is None else len(chunk) + _BESIDE
        try:
            if chunk is not None:
                self.send(msgspec.msgpack.decode(chunk))
        except RuntimeError:  # the stream is closed
            self.abandon()
            self._tell(self._on_closed)
        except Exception as exc:
            self._failure = exc
            self.abandon()
        with self._egress.lock:  # once it is out, the event loop may put it in line again
            has_more = self._is_in_line = bool(self._kept)
        if not has_more:
            self._tell(self._wake)
        return has_more

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(what)

    def _wake(self) -> None:
        if self._sent_all is not None and not self._sent_all.done():
            self._sent_all.set_result(None)
