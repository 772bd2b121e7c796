"""Reads the engine core's output socket from the event loop, at less cost than vLLM.

vLLM waits for its engine on pyzmq's asyncio socket, which queries the state of the socket four times per
message, through enumerations: a quarter of the worker's cost of an engine step with 8 requests. The socket
has one reader that always wants the next message, so it is enough to try to receive.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from zmq.asyncio import Socket


class Receiver:
    """Replaces `recv_multipart` of one socket. It must be created before anybody waits on the socket."""

    def __init__(self, socket: Socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._descriptor = int(self._socket.FD)
        self._waiting: asyncio.Future[None] | None = None
        self._loop.add_reader(self._descriptor, self._readable)
        socket.recv_multipart = self.recv_multipart  # type: ignore[method-assign]

    async def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        while True:
            try:
                return self._socket.recv_multipart(flags | zmq.DONTWAIT, copy=copy, track=track)
            except zmq.Again:
                # ZeroMQ has processed all its signals: the descriptor becomes readable for the next message.
                self._waiting = self._loop.create_future()
                await self._waiting

    def _readable(self) -> None:
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
            return
        try:
            self._socket.get(zmq.EVENTS)  # nobody waits now; this resets the descriptor
        except zmq.ZMQError:
            self.close()  # vLLM has closed the socket

    def close(self) -> None:
        """Stops watching the descriptor, before vLLM closes it: its number may be reused. Idempotent."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = -1
