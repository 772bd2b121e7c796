"""Keeps a TCP connection between a worker and its headless nodes; either side exits when it breaks.

vLLM 0.30 does not notice that a process on another node is gone. The worker's requests would hang, and the
engines of a lost worker would keep their GPUs and never find a new one. So each node holds a connection to
the worker while both live, and learns through it that the worker serves.

An accepted node ends the worker by disconnecting, so nodes must authenticate. The worker sends a fresh random
challenge. The node answers with its ranks, its own challenge, and a proof over both that it has the worker's
admin token; the worker proves the same to the node. Without a token, only this machine and the configured
peers are accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
from typing import TYPE_CHECKING

from dynamo_vllm.errors import EngineDead, StartError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from dynamo_vllm.config.nodes import Node

logger = logging.getLogger(__name__)
HELLO, WELCOME, READY, REFUSED = b"dynamo-vllm ", b"welcome ", b"ready\n", b"refused: "
HELLO_SECONDS = 5.0
RETRY_SECONDS = 0.5
# A machine that vanishes closes no connection: keep-alive notices it after 25 s.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class _Refused(Exception):
    """The peer may not join; the message says why."""


class Followers:
    """The worker's end: `lost` is set when the first node disconnects."""

    def __init__(
        self, awaited: Collection[str] = (), token: str | None = None, peers: Collection[str] = ()
    ) -> None:
        self.lost: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        self._awaited = frozenset(awaited)
        self._token = token
        self._peers = tuple(peers)
        self._joined: set[str] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_ready = False

    async def joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold one connection until it ends; a rejected peer has no effect when it leaves."""
        try:
            asked = secrets.token_hex(16)
            writer.write(HELLO + asked.encode() + b"\n")
            hello = await _hello(reader)
            if not hello.startswith(HELLO):
                logger.warning("an unknown client connected to the node port")
                return
            await self._check_peer(writer)
            places, proof = self._admit(hello, asked)
            name = places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"
            logger.info("%s has joined", name)
            _keep_alive(writer)
            self._writers.add(writer)
            writer.write(WELCOME + proof.encode() + b"\n")
            if self._is_ready:
                writer.write(READY)
            while await _line(reader):
                pass
            if not self.lost.done():
                self.lost.set_result(EngineDead(f"lost the connection to {name}"))
        except _Refused as exc:
            logger.warning("refused a node: %s", exc)
            writer.write(REFUSED + str(exc).encode() + b"\n")
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _check_peer(self, writer: asyncio.StreamWriter) -> None:
        """Without a token the address decides."""
        address = str(writer.get_extra_info("peername")[0])
        if self._token is None and not await _is_named(address, self._peers):
            raise _Refused(
                f"{address} is another machine and there is no token; give all nodes the same --admin-token, "
                "or name the machines with --node-peers"
            )

    def _admit(self, hello: bytes, asked: str) -> tuple[list[str], str]:
        """Reserve the places of a node that may join, and return the worker's own proof."""
        words = hello.removeprefix(HELLO).decode(errors="replace").strip()
        said, answered, proof = (words.rsplit(" ", 2) + ["", ""])[:3]
        if not hmac.compare_digest(
            proof.encode(), _proof(self._token, "node", said, asked, answered).encode()
        ):
            raise _Refused("its --admin-token differs; start all nodes with the same one")
        places = said.split(",")
        if others := set(places) - self._awaited:
            raise _Refused(
                f"this worker has no {min(others)[:40]!r} on another node; start all nodes with the same "
                "flags"
            )
        if taken := set(places) & self._joined:
            raise _Refused(f"{min(taken)} has already joined; start one process for each")
        self._joined.update(places)
        return places, _proof(self._token, "worker", said, asked, answered)

    def ready(self) -> None:
        """Tell every node that the worker serves."""
        self._is_ready = True
        for writer in self._writers:
            writer.write(READY)

    def leave(self) -> None:
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def followers(
    node: Node, token: str | None = None, peers: Collection[str] = ()
) -> AsyncIterator[Followers]:
    """Listen while the block runs, if other nodes run engines for this worker."""
    made = Followers(node.awaited, token, peers)
    if not node.has_followers:
        yield made
        return
    try:
        server = await asyncio.start_server(made.joined, node.leader, node.link_port)
    except OSError as exc:
        raise StartError(
            f"cannot listen for other nodes on {node.leader}:{node.link_port}: {exc.strerror}; the "
            "leader's address must be one of this machine's, and the port after the rendezvous port must "
            "be free"
        ) from exc
    try:
        yield made
    finally:
        server.close()
        made.leave()


async def follow(node: Node, token: str | None, on_ready: Callable[[], None]) -> None:
    """The node's end: connects, however long that takes, and returns when the worker is gone."""
    reader, writer = await _connect(node.leader, node.link_port)
    try:
        _keep_alive(writer)
        asked, answered = await _challenge(reader), secrets.token_hex(16)
        places = ",".join(node.places)
        proof = _proof(token, "node", places, asked, answered)
        writer.write(HELLO + f"{places} {answered} {proof}\n".encode())
        expected = WELCOME + _proof(token, "worker", places, asked, answered).encode() + b"\n"
        is_ours = False
        while line := await _line(reader):
            if hmac.compare_digest(line, expected):
                is_ours = True
            elif line == READY and is_ours:
                on_ready()
            elif line.startswith(REFUSED):
                logger.error("the worker refused this node: %s", line.decode(errors="replace").strip())
    finally:
        writer.close()


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(RETRY_SECONDS)


def _proof(token: str | None, who: str, places: str, asked: str, answered: str) -> str:
    """Prove possession of the token without sending it; useless on another connection."""
    said = f"{who} {places} {asked} {answered}"
    return hmac.new((token or "").encode(), said.encode(), hashlib.sha256).hexdigest()


async def _challenge(reader: asyncio.StreamReader) -> str:
    """Return the worker's challenge, its first line; empty if the worker is gone."""
    return (await _line(reader)).removeprefix(HELLO).decode(errors="replace").strip()


async def _is_named(address: str, peers: Collection[str]) -> bool:
    """Return whether the address is this machine's, or one of these addresses, networks and names."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_loopback or _is_of_this_machine(str(found)):
        return True
    for peer in peers:
        try:
            if found in ipaddress.ip_network(peer, strict=False):
                return True
        except ValueError:  # a name
            with contextlib.suppress(OSError):
                for known in await asyncio.get_running_loop().getaddrinfo(peer, None):
                    if found == ipaddress.ip_address(known[4][0]):
                        return True
    return False


def _is_of_this_machine(address: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


async def _hello(reader: asyncio.StreamReader) -> bytes:
    """Return the first line; empty if it does not arrive in time."""
    reading = asyncio.create_task(_line(reader))
    try:
        # A timeout around readline would lose a line that arrived while a starting engine blocked the loop.
        await asyncio.wait({reading}, timeout=HELLO_SECONDS)
        return reading.result() if reading.done() else b""
    finally:
        reading.cancel()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return a line; empty if the other side is gone."""
    try:
        return await reader.readline()
    except (OSError, ValueError):  # reset, or too long to be one of ours
        return b""


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
