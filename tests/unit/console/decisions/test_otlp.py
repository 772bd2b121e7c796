"""The receiver of records, with an export that runtime 1.6.1 sent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from dynamo_vllm.console.decisions import otlp, records
from dynamo_vllm.console.decisions.otlp import Malformed, Receiver, Unread
from dynamo_vllm.serving.watch import request_trace
from dynamo_vllm.serving.watch.request_trace import Sender
from harness.processes import free_port
from harness.waiting import until_async

BODY = (Path(__file__).parent / "recorded" / "request_end.otlp").read_bytes()


def test_records_are_read_from_the_export() -> None:
    first, second = (records.read(unread.payload()) for unread in otlp.records(BODY))
    assert (first.input_tokens, first.output_tokens, first.block_size) == (70, 4, 32)
    assert len(first.blocks) == 2, "the third block is not whole"
    assert first.worker is not None
    assert (first.prefill_worker, first.counted_blocks) == (None, 0.0)
    assert first.received < first.routed < (first.first_token or 0) < first.ended
    assert (second.output_tokens, second.first_token) == (0, None)


def test_export_that_is_cut_and_other_records_are_refused() -> None:
    for export in (BODY[:-40], b"\x0a\xff", b"\xff" * 20, b"\x0b"):
        with pytest.raises(Malformed):
            otlp.records(export)
    for record in (b"{}", b"[", b'{"request": {"request_id": 7}}'):
        with pytest.raises(records.Unreadable):
            records.read(record)


def test_log_lines_of_the_runtime_are_left_out() -> None:
    assert (otlp.records(BODY.replace(b"dynamo.request_trace", b"dynamo.something_els"))) == []


class Listening:
    def __init__(self) -> None:
        self.url = request_trace.new_url(free_port())
        self.taken: list[tuple[Sender, bytes]] = []

    def take(self, sender: Sender, unread: Sequence[Unread]) -> None:
        self.taken += [(sender, one.payload()) for one in unread]


@pytest_asyncio.fixture
async def listening() -> AsyncIterator[Listening]:
    made = Listening()
    task = asyncio.ensure_future(Receiver(made.url, made.take).run())
    async with httpx.AsyncClient() as client:

        async def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return (await client.get(made.url)).status_code == 404
            return False

        while not await answers():
            await asyncio.sleep(0.01)
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_receiver_takes_records_and_who_sent_them(listening: Listening) -> None:
    async with httpx.AsyncClient() as client:
        for body, headers in ((BODY, {}), (gzip.compress(BODY), {"Content-Encoding": "gzip"})):
            url = f"{listening.url}{request_trace.PATH}?name=x&credit=1.5"
            assert (await client.post(url, content=body, headers=headers)).status_code == 200
    await until_async("both", lambda: len(listening.taken) == 4)
    assert {sender for sender, _ in listening.taken} == {Sender("x", (("credit", "1.5"),))}


async def test_receiver_refuses(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MAX_BYTES", len(BODY))
    url = listening.url + request_trace.PATH
    elsewhere = listening.url.rpartition("/")[0] + "/other/v1/logs"
    packed = {"Content-Encoding": "gzip"}
    async with httpx.AsyncClient() as client:
        assert (await client.post(elsewhere, content=BODY)).status_code == 404
        assert (await client.get(url)).status_code == 405
        assert (await client.post(url, content=b"\xff\xff")).status_code == 400
        assert (await client.post(url, content=BODY + b"x")).status_code == 413
        bomb = gzip.compress(bytes(10 * len(BODY)))
        assert (await client.post(url, content=bomb, headers=packed)).status_code == 400
    assert listening.taken == []


Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def silent_ones(listening: Listening, count: int) -> AsyncIterator[list[Peer]]:
    """Open connections on which nothing is sent."""
    url = httpx.URL(listening.url)
    opened = [await asyncio.open_connection(url.host, url.port) for _ in range(count)]
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def send_records(listening: Listening, client: httpx.AsyncClient) -> int:
    return (await client.post(listening.url + request_trace.PATH, content=BODY)).status_code


async def test_connections_without_a_request_keep_no_frontend_away(listening: Listening) -> None:
    async with silent_ones(listening, otlp.MOST_UNKNOWN + 40) as silent, httpx.AsyncClient() as client:
        assert await send_records(listening, client) == 200
        async with asyncio.timeout(30):
            assert await silent[0][0].read() == b""  # the oldest


async def test_burst_of_connections_leaves_none_open(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many come at once that the oldest are closed before anything was done for them."""
    monkeypatch.setattr(otlp, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(otlp, "MOST_UNKNOWN", 2)
    url = httpx.URL(listening.url)
    assert url.port is not None
    opened: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for _ in range(40):  # all before the loop can accept one
            one = stack.enter_context(socket.create_connection((url.host, url.port), 30))
            one.setblocking(False)
            opened.append(one)
        for one in opened:
            async with asyncio.timeout(30):
                assert await asyncio.get_running_loop().sock_recv(one, 1) == b""


async def test_new_connection_must_ask_soon_and_that_of_a_frontend_stays(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with httpx.AsyncClient() as client:
        assert await send_records(listening, client) == 200
        monkeypatch.setattr(otlp, "HEAD_SECONDS", 0.05)
        async with silent_ones(listening, 1) as silent, asyncio.timeout(30):
            assert await silent[0][0].read() == b""
            monkeypatch.setattr(otlp, "HEAD_SECONDS", 0.0)  # a second connection would be refused
            assert await send_records(listening, client) == 200


async def test_frontends_have_only_so_many_connections(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "MOST_CONNECTIONS", 1)
    async with httpx.AsyncClient() as one, httpx.AsyncClient() as other:
        assert await send_records(listening, one) == 200
        assert await send_records(listening, other) == 503
        assert await send_records(listening, one) == 200
