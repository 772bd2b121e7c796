"""Tests that our reader of the output socket loses no message and does not spin."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from dynamo_vllm.engine.vllm.output_socket import Receiver

Pair = tuple[zmq.Socket[bytes], zmq.asyncio.Socket]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """Yields a sender, and the receiving socket as vLLM creates it."""
    with zmq.Context() as context:
        pull = zmq.asyncio.Context(context).socket(zmq.PULL)
        pull.bind(f"ipc://{tmp_path}/s")
        push = context.socket(zmq.PUSH)
        push.connect(f"ipc://{tmp_path}/s")
        yield push, pull
        push.close(0)
        pull.close(0)


async def test_every_message_comes_in_order(pair: Pair) -> None:
    push, pull = pair
    receiver = Receiver(pull)

    def send() -> None:
        for number in range(1500):
            push.send_multipart([b"head", str(number).encode()])

    sender = threading.Thread(target=send)
    sender.start()
    for number in range(1500):
        frames = await asyncio.wait_for(pull.recv_multipart(copy=False), 30)
        assert [frame.bytes for frame in frames] == [b"head", str(number).encode()]
    sender.join()
    receiver.close()


async def test_message_without_a_reader_is_kept_and_does_not_spin(pair: Pair) -> None:
    push, pull = pair
    receiver = Receiver(pull)
    looks = 0
    readable = receiver._readable

    def counted() -> None:
        nonlocal looks
        looks += 1
        readable()

    asyncio.get_running_loop().add_reader(receiver._descriptor, counted)
    for number in range(50):
        push.send(str(number).encode())
        await asyncio.sleep(0.002)  # the loop runs, nobody reads
    assert 0 < looks <= 200
    found = [await asyncio.wait_for(pull.recv_multipart(), 30) for _ in range(50)]
    assert found == [[str(number).encode()] for number in range(50)]
    receiver.close()


async def test_a_waiting_reader_is_woken_once_cancelled_another_can_wait(pair: Pair) -> None:
    push, pull = pair
    receiver = Receiver(pull)
    first = asyncio.ensure_future(pull.recv_multipart())
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.ensure_future(pull.recv_multipart())
    await asyncio.sleep(0)
    push.send(b"x")
    assert await asyncio.wait_for(second, 30) == [b"x"]
    receiver.close()
    receiver.close()


async def test_closed_socket_is_not_watched_any_more(pair: Pair) -> None:
    """vLLM closes the socket when the engine dies; the number of its descriptor may be reused."""
    push, pull = pair
    receiver = Receiver(pull)
    descriptor = receiver._descriptor
    push.close(0)
    pull.close(0)
    receiver._readable()
    assert not asyncio.get_running_loop().remove_reader(descriptor)
