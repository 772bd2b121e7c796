"""Clients without a login that keep the console busy while an operator logs in and works."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from dynamo_vllm import ports
from dynamo_vllm.console import connections, logins, server
from harness.console_app import Console, streamed
from harness.waiting import until_async

CLIENTS = 120
LIMIT_SECONDS = 60
PREFIX = "/console/"


@dataclasses.dataclass
class Listening:
    """A console that needs a login, on a port of its own or behind the gateway."""

    console: Console
    uds: str | None
    streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.console.settings.port}"

    async def send(self, data: bytes, client: int = 1) -> asyncio.StreamReader:
        """Send from one of many addresses; the fixture closes the connection."""
        if self.uds is not None:
            reader, writer = await asyncio.open_unix_connection(self.uds)
        else:
            local = (f"127.0.{client >> 8}.{client & 255}", 0)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.console.settings.port, local_addr=local
            )
        self.streams.append((reader, writer))
        writer.write(data)
        return reader

    def head(self, path: str, client: int = 1, length: int = 30) -> bytes:
        lines = [
            *(f"POST {path} HTTP/1.1", f"Host: {self.host}", f"Origin: http://{self.host}", "X-Console: 1"),
            *(f"X-Gateway-Client: 10.1.{client >> 8}.{client & 255}", f"Content-Length: {length}"),
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Origin": f"http://{self.host}", "X-Console": "1", "X-Gateway-Client": "192.0.2.1"}
        transport = httpx.AsyncHTTPTransport(uds=self.uds)
        url = f"http://{self.host}"
        async with httpx.AsyncClient(transport=transport, base_url=url, headers=headers, timeout=60) as http:
            yield http


@pytest_asyncio.fixture(params=["port", "gateway"])
async def listening(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Listening]:
    monkeypatch.setattr(server, "MOST_AT_ONCE", CLIENTS - 20)
    uds = str(tmp_path / "s") if request.param == "gateway" else None
    opened = server.on_socket(Path(uds)) if uds is not None else server.listen("127.0.0.1", None, 0)
    port = 8001 if uds is not None else ports.number(opened)
    console = Console(tmp_path, token="t", port=port, prefix="/" if uds is None else PREFIX)
    console.upstream.make = lambda: streamed(200, b"{}", "application/json")
    running = server.Server(server.config_of(console.app))
    task = asyncio.ensure_future(running.serve([opened]))
    await until_async("the console", lambda: running.started)
    served = Listening(console, uds, [])
    yield served
    for _, writer in served.streams:
        writer.close()
    running.should_exit = running.force_exit = True
    await task


@pytest.fixture
def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 50)
    monkeypatch.setattr(connections, "FRESH_SECONDS", 0.0)


async def works(listening: Listening) -> list[int]:
    """Return what an operator gets who logs in and works."""
    statuses = []
    async with listening.operator() as http:
        statuses.append((await http.get("/")).status_code)
        statuses.append((await http.post("/api/login", json={"token": "t"})).status_code)
        cookie = {"Cookie": "; ".join(f"{name}={value}" for name, value in http.cookies.items())}
        paths = ("/api/settings", "/api/history", "/api/logs")
        statuses += [(await http.get(path, headers=cookie)).status_code for path in paths]
        statuses.append((await http.post("/v1/chat/completions", json={}, headers=cookie)).status_code)
        statuses.append((await http.post("/api/login", json={"token": "t"})).status_code)
    return statuses


@pytest.mark.parametrize("addresses", [1, CLIENTS])
async def test_operator_logs_in_and_works_beside_many_slow_logins(
    listening: Listening, addresses: int
) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        readers = []
        for number in range(CLIENTS):
            client = 1 + number % addresses
            readers.append(await listening.send(listening.head("/api/login", client) + b"{", client))
        assert await works(listening) == [200] * 7
        answers = await asyncio.gather(*(reader.read() for reader in readers[: -logins.MOST_LOGINS]))
    first = Counter(answer.split(b" ", 2)[1] for answer in answers)
    is_shared = addresses == 1 or listening.uds is None  # all of 127.0.0.0/8 is this machine
    refused = b"429" if is_shared else b"503"
    assert first == {refused: len(answers)}
    assert all(b"connection: close" in answer.lower() for answer in answers)
    assert all(b'"fix":"try again' in answer for answer in answers)


async def test_login_that_is_not_complete_in_time_is_told_so(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "LOGIN_SECONDS", 0.05)
    async with asyncio.timeout(LIMIT_SECONDS):
        answer = await (await listening.send(listening.head("/api/login") + b"{")).read()
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer


async def test_long_login_is_refused_before_it_is_read(listening: Listening) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        reader = await listening.send(listening.head("/api/login", length=5000))
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")


async def test_nobody_waits_for_another_body_before_the_login(listening: Listening) -> None:
    paths = "/api/logout /api/actions/pause /api/bench /api/bench/stop /v1/chat/completions /v1/x"
    async with asyncio.timeout(LIMIT_SECONDS):
        for path in paths.split():
            reader = await listening.send(listening.head(path) + b"{")
            assert (await reader.readline()).startswith(b"HTTP/1.1 401"), path


async def test_client_that_leaves_during_its_login_is_no_error(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(LIMIT_SECONDS):
        for _ in range(20):
            await listening.send(listening.head("/api/login") + b"{")
            listening.streams[-1][1].close()
        assert await works(listening) == [200] * 7
    assert caplog.records == []


async def test_operator_works_beside_many_connections_without_a_request(
    listening: Listening, few_connections: None
) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n"):
            for _ in range(CLIENTS):
                await listening.send(sent)
            assert await works(listening) == [200] * 7


async def test_operator_works_beside_clients_that_do_not_read(
    listening: Listening, few_connections: None
) -> None:
    request = f"GET /assets/app.js HTTP/1.1\r\nHost: {listening.host}\r\n\r\n".encode()
    async with asyncio.timeout(LIMIT_SECONDS):
        for _ in range(CLIENTS):
            await listening.send(request)
            listening.streams[-1][1].transport.pause_reading()  # type: ignore[attr-defined]
        assert await works(listening) == [200] * 7


async def test_connection_whose_request_is_answered_is_not_closed_for_others(
    listening: Listening, few_connections: None
) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), listening.operator() as http:
        await http.post("/api/login", json={"token": "t"})
        cookie = {"Cookie": "; ".join(f"{name}={value}" for name, value in http.cookies.items())}
        async with http.stream("GET", "/api/live", headers=cookie) as page:
            parts = page.aiter_raw()
            await anext(parts)
            for _ in range(CLIENTS):
                await listening.send(b"")
            listening.console.hub.publish("sample", {"text": "still here"})
            assert b"still here" in await anext(parts)


async def test_connections_that_come_at_the_same_moment_are_all_read(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 1)
    monkeypatch.setattr(connections, "FRESH_SECONDS", 2 * LIMIT_SECONDS)
    async with asyncio.timeout(LIMIT_SECONDS):
        readers = [await listening.send(b"GET /live HTTP/1.1\r\n") for _ in range(50)]
        for _, writer in listening.streams:
            writer.write(f"Host: {listening.host}\r\n\r\n".encode())
        assert {await reader.readline() for reader in readers} == {b"HTTP/1.1 200 OK\r\n"}
