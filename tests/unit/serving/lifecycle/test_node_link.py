"""The line between a worker and its other nodes, over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from dynamo_vllm.config.nodes import Node
from dynamo_vllm.errors import StartError
from dynamo_vllm.serving.lifecycle import node_link
from harness.processes import free_port
from harness.waiting import until_async


def pair() -> tuple[Node, Node]:
    port = free_port() - 1
    leader = Node(all_ranks=2, local_ranks=1, port=port)
    return leader, Node(is_headless=True, all_ranks=2, local_ranks=1, first_rank=1, port=port)


class Following:
    """A node's end as a task."""

    def __init__(self, node: Node, token: str | None = None) -> None:
        self.ready = asyncio.Event()
        self.task = asyncio.create_task(node_link.follow(node, token, self.ready.set))

    async def leave(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


@asynccontextmanager
async def serving(
    token: str | None = None, peers: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Node, node_link.Followers]]:
    """The node that may join, and the worker's side, which serves."""
    leader, node = pair()
    async with asyncio.timeout(30), node_link.followers(leader, token, peers) as followers:
        followers.ready()
        yield node, followers


async def joined(node: Node, token: str | None = None) -> Following:
    following = Following(node, token)
    await following.ready.wait()
    return following


async def spoken_with(node: Node, said: bytes) -> bytes:
    """What the worker answers to these bytes."""
    reader, writer = await asyncio.open_connection(node.leader, node.link_port)
    writer.write(said)
    writer.write_eof()
    answer = b""
    with contextlib.suppress(OSError):
        while data := await reader.read(4096):
            answer += data
    writer.close()
    return answer


async def test_node_hears_that_the_worker_serves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    leader, node = pair()
    async with asyncio.timeout(30), node_link.followers(leader) as followers:
        following = Following(node)
        await until_async("the node", lambda: "rank 1 has joined" in caplog.text)
        assert not following.ready.is_set()
        followers.ready()
        await following.ready.wait()
        await following.leave()


async def test_node_learns_that_the_worker_is_gone() -> None:
    async with serving() as (node, _):
        following = await joined(node)
        assert not following.task.done()
    await asyncio.wait_for(following.task, 30)


async def test_node_waits_for_its_worker() -> None:
    leader, node = pair()
    following = Following(node)
    await asyncio.sleep(0.05)
    assert not following.task.done()
    async with asyncio.timeout(30), node_link.followers(leader) as followers:
        followers.ready()
        await following.ready.wait()
        await following.leave()


@pytest.mark.parametrize("token", ["hush", None])
async def test_nodes_with_the_same_token_meet_and_a_loss_is_told(token: str | None) -> None:
    async with serving(token) as (node, followers):
        following = await joined(node, token)
        assert not followers.lost.done()
        await following.leave()
        assert str(await followers.lost) == "lost the connection to rank 1"


@pytest.mark.parametrize(
    ("change", "token", "reason"),
    [
        ({}, "guess", "its --admin-token differs"),
        ({}, None, "its --admin-token differs"),
        ({"first_rank": 2}, "hush", "this worker has no 'rank 2' on another node"),
        ({"local_ranks": 2}, "hush", "this worker has no 'rank 2' on another node"),
        ({"first_rank": 0}, "hush", "this worker has no 'rank 0' on another node"),
        ({"nodes_per_rank": 2, "node_rank": 1}, "hush", "this worker has no 'node 1' on another node"),
    ],
)
async def test_node_that_is_not_awaited_is_told_so_and_does_no_harm(
    change: dict[str, Any], token: str | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving("hush") as (node, followers):
        stranger = Following(dataclasses.replace(node, **change), token)
        await stranger.task
        assert not stranger.ready.is_set() and not followers.lost.done()
        assert caplog.text.count(reason) == 2, "on both sides"
        await (await joined(node, "hush")).leave()


async def test_second_node_at_the_same_place_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (node, followers):
        following = await joined(node)
        await Following(node).task
        assert caplog.text.count("rank 1 has already joined") == 2
        assert not followers.lost.done()
        await following.leave()
        assert str(await followers.lost) == "lost the connection to rank 1"


async def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "HELLO_SECONDS", 0.1)
    async with serving() as (node, followers):
        reader, writer = await asyncio.open_connection(node.leader, node.link_port)
        writer.write(node_link.HELLO)  # and no end of the line
        assert (await reader.readline()).startswith(node_link.HELLO)
        assert await reader.read() == b""
        writer.close()
        assert not followers.lost.done()


def test_worker_that_was_held_up_still_hears_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of an engine may hold the loop up for longer than a node's first line may take."""
    monkeypatch.setattr(node_link, "HELLO_SECONDS", 0.2)
    heard: list[bytes] = []

    async def talk() -> None:
        port = free_port()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asyncio.get_running_loop().call_soon(hold_up)
            heard.append(await node_link._hello(reader))
            writer.close()

        def hold_up() -> None:
            node.sendall(b"hello\n")
            time.sleep(2 * node_link.HELLO_SECONDS)

        async with asyncio.timeout(30), await asyncio.start_server(accepted, "127.0.0.1", port):
            with socket.create_connection(("127.0.0.1", port)) as node:
                await until_async("its word", lambda: heard)

    uvloop.run(talk())  # as the worker does
    assert heard == [b"hello\n"]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"", b"x" * 200_000])
async def test_stranger_on_the_port_is_no_node(said: bytes) -> None:
    async with serving() as (node, followers):
        answer = await spoken_with(node, said)
        assert len(answer) <= len(node_link.HELLO) + 32 + len(b"\n"), "no more than its question"
        assert not followers.lost.done()


async def test_taken_port_is_refused_with_the_address() -> None:
    leader, _ = pair()
    with (
        socket.create_server((leader.leader, leader.link_port)),
        pytest.raises(StartError, match=f"on 127.0.0.1:{leader.link_port}"),
    ):
        async with node_link.followers(leader):
            pass


async def test_worker_without_other_nodes_listens_nowhere() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        alone = Node(all_ranks=2, local_ranks=2, port=int(taken.getsockname()[1]) - 1)
        async with node_link.followers(alone) as followers:
            followers.ready()
            assert not followers.lost.done()


async def test_what_a_node_said_cannot_be_said_again() -> None:
    """By somebody who listened in and does not have the token."""
    leader, node = pair()
    spoken: list[bytes] = []
    between = free_port()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_worker = await asyncio.open_connection(leader.leader, leader.link_port)

        async def back() -> None:
            while data := await behind.read(4096):
                writer.write(data)

        answering = asyncio.create_task(back())
        spoken.append(await reader.readline())
        to_worker.write(spoken[0])
        await reader.read()
        answering.cancel()
        to_worker.close()
        writer.close()

    async with asyncio.timeout(30), await asyncio.start_server(pass_on, "127.0.0.1", between):
        async with node_link.followers(leader, "hush") as followers:
            followers.ready()
            await (await joined(dataclasses.replace(node, port=between - 1), "hush")).leave()
            await followers.lost
        async with node_link.followers(leader, "hush") as followers:
            assert b"its --admin-token differs" in await spoken_with(node, spoken[0])
            assert not followers.lost.done()


async def test_node_believes_no_worker_without_the_token() -> None:
    _, node = pair()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(node_link.HELLO + b"0123\n")
        await reader.readline()
        writer.write(node_link.WELCOME + b"0" * 64 + b"\n" + node_link.READY)
        writer.close()

    async with asyncio.timeout(30), await asyncio.start_server(pretend, node.leader, node.link_port):
        following = Following(node, "hush")
        await following.task
        assert not following.ready.is_set()


async def test_without_a_token_this_machine_and_named_ones_may_join() -> None:
    for address, peers, expected in (
        ("127.0.0.1", (), True),
        ("::ffff:127.0.0.1", (), True),
        ("192.0.2.7", (), False),
        ("192.0.2.7", ("192.0.2.8",), False),
        ("192.0.2.7", ("192.0.2.8", "192.0.2.7"), True),
        ("192.0.2.7", ("192.0.2.0/24",), True),
        ("192.0.2.7", ("localhost",), False),
        ("2001:db8::7", ("2001:db8::/64",), True),
    ):
        assert await node_link._is_named(address, peers) is expected


async def test_node_of_another_machine_needs_a_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_named = node_link._is_named
    monkeypatch.setattr(node_link, "_is_named", lambda _, peers: is_named("192.0.2.7", peers))
    async with serving() as (node, followers):
        stranger = Following(node)
        await stranger.task
        assert not stranger.ready.is_set() and not followers.lost.done()
        assert caplog.text.count("give all nodes the same --admin-token, or name the machines") == 2
    async with serving(peers=("192.0.2.0/24",)) as (node, _):
        await (await joined(node)).leave()
