"""Follows the event channels of workers and frontends over ZeroMQ, on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from dynamo_vllm.console.decisions.messages import Unreadable, read_envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dynamo_vllm.console.decisions.messages import Envelope

logger = logging.getLogger(__name__)
MOST_WAITING = 20_000
"""Messages of one publisher that wait for us; of more it drops the newest, and `is_gap` says so."""
MAX_BYTES = 64 << 20
GATHER_SECONDS = 0.25
"""How long messages wait to be read; they say themselves when they were sent."""
SLICE_SECONDS, CATCH_UP_SECONDS = 0.01, 0.25
"""Processor time for messages before others on the loop have their turn, and if somebody must know of all."""

_LOST, _THERE = zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED


class EventFeed:
    """Calls `take` with each message, and whether messages of its publisher were lost before it.

    It calls `connected` with an address whose publisher is there (True), or whose connection is lost: that
    tells at once that a process has died, which discovery tells after its lease of ten seconds.
    """

    def __init__(
        self,
        take: Callable[[Envelope, bool], None],
        connected: Callable[[str, bool], None] = lambda address, is_there: None,
    ) -> None:
        self._take = take
        self._connected = connected
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._fd = self._socket.fileno()
        self._changes = self._socket.get_monitor_socket(_LOST | _THERE)
        self._addresses: set[str] = set()
        self._last: dict[int, int] = {}
        """The number of the last message of each publisher."""
        self._is_unreadable = self._has_failed = False
        self._next_read: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._gather)
        self._loop.add_reader(self._changes.fileno(), self._read_changes)
        self._loop.call_soon(self._read_changes)  # else ZeroMQ would not tell of the first

    def follow(self, addresses: Collection[str], publishers: Collection[int]) -> None:
        """Connect to new channels, and leave those that are gone."""
        for address in self._addresses - set(addresses):
            self._addresses.discard(address)
            with contextlib.suppress(zmq.ZMQError):  # ZeroMQ has left it by itself
                self._socket.disconnect(address)
        for address in set(addresses) - self._addresses:
            try:
                self._socket.connect(address)
                self._addresses.add(address)
            except zmq.ZMQError as exc:
                logger.warning("the event channel %s cannot be read: %s", address, exc)
        for publisher in self._last.keys() - set(publishers):
            del self._last[publisher]
        self._read_after(0)  # ZeroMQ tells of a change of its state once, to any call

    def is_heard(self, publisher: int) -> bool:
        return publisher in self._last

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._changes.fileno())
        self._socket.disable_monitor()
        self._changes.close(0)
        self._socket.close()
        self._context.term()

    def catch_up(self) -> None:
        """Read what has come, for somebody who must know of it."""
        self._read(CATCH_UP_SECONDS)

    def _gather(self) -> None:
        """Let messages come together: to be woken for each would cost more than to read it."""
        self._read_after(GATHER_SECONDS)

    def _read_after(self, seconds: float) -> None:
        """Read then, and not when it was said before: each read has one that follows it, never two."""
        if self._next_read is not None:
            self._next_read.cancel()
        self._loop.remove_reader(self._fd)
        self._next_read = self._loop.call_later(seconds, self._read)

    def _read(self, seconds: float = SLICE_SECONDS) -> None:
        if self._socket.closed:
            return
        if self._next_read is not None:
            self._next_read.cancel()
            self._next_read = None
        end = time.thread_time() + seconds  # a busy machine takes the processor away for longer than that
        while True:
            try:
                frames = self._receive()
            except zmq.ZMQError:  # usually that there is none
                self._loop.add_reader(self._fd, self._gather)
                return
            self._read_one(frames)
            if time.thread_time() > end:
                self._read_after(0)
                return

    def _receive(self) -> list[bytes]:
        """Return the frames of a message; raise zmq.Again if there is none.

        It is `recv_multipart`, which takes twice as long: it asks the socket after each frame for more.
        """
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame.bytes)
        return frames

    def _read_changes(self) -> None:
        while not self._changes.closed:
            try:
                told = parse_monitor_message(self._changes.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            address = told["endpoint"].decode()
            if address in self._addresses:
                try:
                    self._connected(address, told["event"] == _THERE)
                except Exception:
                    self._note_failure()

    def _read_one(self, frames: list[bytes]) -> None:
        try:
            envelope = read_envelope(frames)
            before = self._last.get(envelope.publisher_id, -1)
            self._last[envelope.publisher_id] = envelope.sequence
            self._take(envelope, envelope.sequence != before + 1)
        except Unreadable as exc:
            if not self._is_unreadable:
                logger.warning("events of another version of the runtime are not shown: %s", exc)
            self._is_unreadable = True
        except Exception:
            self._note_failure()

    def _note_failure(self) -> None:
        """Tell of the first unexpected exception only: one message must not end the feed."""
        if not self._has_failed:
            logger.exception("an event could not be taken; further ones are not told of")
        self._has_failed = True
