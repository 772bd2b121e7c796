"""The line between a worker and the nodes that run engines for it: who loses the other ends.

vLLM 0.30 does not notice that a process on another node is gone. The worker's requests would hang, and the
engines of a lost worker would keep their GPUs and never find a new one. So each node holds a connection to
the worker for as long as both live, and hears on it that the worker serves.

A node says first what it runs and that it has the worker's admin token, where there is one: to be let in
means that one can end the worker, by going.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import socket
from typing import TYPE_CHECKING

from dynamo_vllm.errors import EngineDead, StartError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from dynamo_vllm.config.nodes import Node

logger = logging.getLogger(__name__)
HELLO, READY, REFUSED = b"dynamo-vllm ", b"ready\n", b"refused: "
HELLO_SECONDS = 5.0
RETRY_SECONDS = 0.5
# A machine that vanishes says no goodbye: the kernel asks, and gives up after 25 s.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class _Refused(Exception):
    """Nobody who may stand for a node; the message says why."""


class Followers:
    """The worker's end: `lost` is set with the first node that goes."""

    def __init__(self, awaited: Collection[str] = (), token: str | None = None) -> None:
        self.lost: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        self._awaited = frozenset(awaited)
        self._token = token
        self._joined: set[str] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_ready = False

    async def joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Holds one connection until it ends; who is not let in does no harm by going."""
        try:
            hello = await _hello(reader)
            if not hello.startswith(HELLO):
                logger.warning("something that is no node of ours spoke to the node port")
                return
            places = self._admit(hello)
            name = places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"
            logger.info("%s has joined", name)
            _keep_alive(writer)
            self._writers.add(writer)
            if self._is_ready:
                writer.write(READY)
            while await _line(reader):
                pass
            if not self.lost.done():
                self.lost.set_result(EngineDead(f"{name} is gone"))
        except _Refused as exc:
            logger.warning("a node was not let in: %s", exc)
            writer.write(REFUSED + str(exc).encode() + b"\n")
        finally:
            self._writers.discard(writer)
            writer.close()

    def _admit(self, hello: bytes) -> list[str]:
        """The places of a node that may join, from now on taken."""
        said, _, proof = hello.removeprefix(HELLO).decode(errors="replace").strip().rpartition(" ")
        if not hmac.compare_digest(proof.encode(), _proof(self._token, said).encode()):
            raise _Refused("its --admin-token is another; start all nodes with the same one")
        places = said.split(",")
        if others := set(places) - self._awaited:
            raise _Refused(
                f"this worker has no {min(others)[:40]!r} on another node; give all the same flags"
            )
        if taken := set(places) & self._joined:
            raise _Refused(f"{min(taken)} has joined already; start one process for each place")
        self._joined.update(places)
        return places

    def ready(self) -> None:
        """Tell every node that the worker serves."""
        self._is_ready = True
        for writer in self._writers:
            writer.write(READY)

    def leave(self) -> None:
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def followers(node: Node, token: str | None = None) -> AsyncIterator[Followers]:
    """Listens while the block runs, where other nodes run engines for this worker."""
    made = Followers(node.awaited, token)
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


async def follow(node: Node, token: str | None, on_ready: Callable[[], None]) -> None:
    """A node's end: returns when the worker is gone; connects first, however long that takes."""
    reader, writer = await _connect(node.leader, node.lifeline_port)
    try:
        _keep_alive(writer)
        places = ",".join(node.places)
        writer.write(HELLO + f"{places} {_proof(token, places)}\n".encode())
        while line := await _line(reader):
            if line == READY:
                on_ready()
            elif line.startswith(REFUSED):
                logger.error("the worker does not take this node: %s", line.decode(errors="replace").strip())
    finally:
        writer.close()


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(RETRY_SECONDS)


def _proof(token: str | None, places: str) -> str:
    """That one has the token, without telling it; where there is none, no more than a check sum."""
    return hmac.new((token or "").encode(), f"node {places}".encode(), hashlib.sha256).hexdigest()


async def _hello(reader: asyncio.StreamReader) -> bytes:
    """The first line; empty when it does not come in time."""
    reading = asyncio.create_task(_line(reader))
    try:
        # A timeout around it would forget a line that came while a starting engine held the loop up.
        await asyncio.wait({reading}, timeout=HELLO_SECONDS)
        return reading.result() if reading.done() else b""
    finally:
        reading.cancel()


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
