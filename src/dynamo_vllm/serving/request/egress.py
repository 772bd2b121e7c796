"""Where answers leave the worker: a client that does not read keeps nobody but itself waiting.

The runtime's `send` waits while its client does not read, and it is called on the event loop, where all
requests would wait with it. It has no form that does not wait, and does not tell how much room it has. But
behind it are places for some chunks, which a task of the runtime empties into the client's connection; they
are full only where that connection takes nothing more. So a stream sends as many chunks as there are places
for sure, then looks at the connections (one look serves all streams) and sends as many again. Only while one
of them is full do chunks go through a thread, which may wait; a stream that keeps it waiting keeps that
thread to itself, and another one goes on with the rest.
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
"""What a stream sends between two looks. The runtime (1.6.1) has about 190 places; a look that another stream
took may be as many chunks old."""
PATIENCE_SECONDS = 0.02
"""A thread that sends one chunk for longer waits for that client, and another one takes over."""
UNREAD_BYTES = 4 << 20
_BESIDE = 64
"""Bytes that a kept chunk takes beside its own."""
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
        """Threads that wait for one client each."""
        self.looks = 0
        self._has_room = True
        self._full_connections = full_connections
        self._watch: asyncio.TimerHandle | None = None

    def stream(self, send: Callable[[Chunk], None], on_closed: Callable[[], None]) -> Stream:
        """For one request; `on_closed` is told when nobody takes its answer any more."""
        return Stream(self, send, on_closed)

    def has_room(self, look: int) -> bool:
        """Whether all connections take more, but for those whose threads wait; newer than the look given."""
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
        """Another one takes over where the thread waits for a client."""
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
    """Sends a chunk of each stream in turn, until one keeps it waiting."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress
        self.stream: Stream | None = None
        """What it is busy with."""
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
    """One answer on its way out; all but `send_next` is called on the event loop."""

    def __init__(self, egress: Egress, send: Callable[[Chunk], None], on_closed: Callable[[], None]) -> None:
        self.send = send
        """The runtime's own: for as many chunks as there are places."""
        self._egress = egress
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._look = egress.looks
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._is_in_line = False
        self.is_waited_for = False
        """By a thread of its own."""
        self._since_look = 0
        self._failure: Exception | None = None
        self._sent_all: asyncio.Future[None] | None = None

    def pass_on(self, chunk: Chunk) -> int:
        """Sends a chunk for which there may be no place; how many may follow it at once."""
        if self._failure is not None:
            raise self._failure
        if not self._is_in_line and self._may_send():
            self.send(chunk)
            return CHUNKS - 1
        self._keep(chunk)
        return 0

    def _may_send(self) -> bool:
        """Looks once for as many chunks, also where there was no room."""
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
                raise ClientBehind(f"the client leaves more than {egress.unread_bytes} bytes unread")
            self._kept.append(kept)
            self._kept_bytes += len(kept) + _BESIDE
            is_in_line, self._is_in_line = self._is_in_line, True
        if not is_in_line:
            egress.enqueue(self)

    def _forget(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    async def sent(self) -> None:
        """Returns when the runtime has every chunk."""
        with self._egress.lock:
            if not self._is_in_line:
                return
            self._sent_all = self._loop.create_future()
        await self._sent_all
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """What is still kept is sent to nobody; nothing to do after a normal end."""
        with self._egress.lock:
            self._forget()

    def send_next(self) -> bool:
        """In a thread: may wait for the client for as long as it likes. Whether there is more to send."""
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
