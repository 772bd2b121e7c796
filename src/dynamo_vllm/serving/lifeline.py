"""The line between a worker and the nodes that run engines for it: who loses the other ends.

vLLM 0.30 does not notice that a process on another node is gone. The worker's requests would hang, and the
engines of a lost worker would keep their GPUs and never find a new one. So each node holds a connection to
the worker for as long as both live, and hears on it that the worker serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING

from dynamo_vllm.errors import EngineDead, StartError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dynamo_vllm.config.nodes import Node

logger = logging.getLogger(__name__)
HELLO, READY = b"dynamo-vllm ", b"ready\n"
RETRY_SECONDS = 0.5
# A machine that vanishes says no goodbye: the kernel asks, and gives up after 25 s.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Followers:
    """The worker's end: `lost` is set with the first node that goes."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_ready = False

    async def joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Holds one connection until it ends."""
        try:
            hello = await _line(reader)
            if not hello.startswith(HELLO):
                logger.warning("something that is no node of ours spoke to the node port")
                return
            name = hello.removeprefix(HELLO).decode(errors="replace").strip()
            logger.info("%s has joined", name)
            _keep_alive(writer)
            self._writers.add(writer)
            if self._is_ready:
                writer.write(READY)
            while await _line(reader):
                pass
            if not self.lost.done():
                self.lost.set_result(EngineDead(f"{name} is gone"))
        finally:
            self._writers.discard(writer)
            writer.close()

    def ready(self) -> None:
        """Tell every node that the worker serves."""
        self._is_ready = True
        for writer in self._writers:
            writer.write(READY)

    def leave(self) -> None:
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def followers(node: Node) -> AsyncIterator[Followers]:
    """Listens while the block runs, where other nodes run engines for this worker."""
    made = Followers()
    if not node.has_followers:
        yield made
        return
    try:
        server = await asyncio.start_server(made.joined, node.leader, node.lifeline_port)
    except OSError as exc:
        raise StartError(
            f"cannot listen for other nodes on {node.leader}:{node.lifeline_port}: {exc.strerror}; the "
            "leader's address must be one of this machine's, and the port behind the meeting port free"
        ) from exc
    try:
        yield made
    finally:
        server.close()
        made.leave()


async def follow(node: Node, on_ready: Callable[[], None]) -> None:
    """A node's end: returns when the worker is gone; connects first, however long that takes."""
    reader, writer = await _connect(node.leader, node.lifeline_port)
    try:
        _keep_alive(writer)
        writer.write(HELLO + node.name.encode() + b"\n")
        while line := await _line(reader):
            if line == READY:
                on_ready()
    finally:
        writer.close()


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(RETRY_SECONDS)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Empty when the other side is gone."""
    try:
        return await reader.readline()
    except (OSError, ValueError):  # reset, or too long to be one of ours
        return b""


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
