"""Reads the engine core's output socket from the event loop with fewer steps than vLLM.

vLLM waits for its engine on a pyzmq socket for asyncio, which asks the socket for its state four times per
message, through enumerations: a quarter of what an engine step of 8 requests costs the worker. There is one
reader and it always wants the next message, so trying to receive is all the asking needed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from zmq.asyncio import Socket


class Receiver:
    """Takes the place of one socket's `recv_multipart`. To be made before anybody waits on the socket."""

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
                # ZeroMQ has looked at all there was: the descriptor tells of what comes from now on.
                self._waiting = self._loop.create_future()
                await self._waiting

    def _readable(self) -> None:
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
            return
        try:
            self._socket.get(zmq.EVENTS)  # nobody waits just now; this takes the signal back
        except zmq.ZMQError:
            self.close()  # vLLM has closed the socket

    def close(self) -> None:
        """Before vLLM closes its socket: the number of its descriptor may be used again. Idempotent."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = -1
