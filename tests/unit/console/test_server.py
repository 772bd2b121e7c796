"""Where the console listens, and which connections it keeps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dynamo_vllm import ports
from dynamo_vllm.cli import main as cli
from dynamo_vllm.cli.start import console
from dynamo_vllm.console import connections, server
from dynamo_vllm.errors import StartError


def test_named_port_that_is_taken_is_refused_and_another_one_avoided() -> None:
    with server.listen("127.0.0.1", 0, 0) as one:
        taken = ports.number(one)
        with pytest.raises(StartError, match=f"--console-port {taken} on 127.0.0.1 cannot be used"):
            server.listen("127.0.0.1", taken, 1)
        with server.listen("127.0.0.1", None, taken) as other:
            assert ports.number(other) != taken


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartError, match=r"--console-host 192\.0\.2\.1 cannot be used"):
        server.listen("192.0.2.1", None, 0).close()


def test_console_listens_on_ipv6_too() -> None:
    with contextlib.suppress(StartError), server.listen("::1", None, 0) as one:
        assert one.getsockname()[0] == "::1"


def test_port_is_the_one_after_the_deployments() -> None:
    assert console.port_after("http://h:8000") == 8001
    assert {console.port_after(url) for url in ("https://h", "http://h:80", "http://h:65535")} == {0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--console-host", "0.0.0.0"], "give --admin-token"),
        (["--no-such"], "is not an option of the console"),
        (["--url", "ftp://x"], "is not the URL of a frontend"),
    ],
)
def test_bad_settings_end_with_code_2(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dynamo_vllm.config.build.environment", dict)
    assert cli.run(["console", *words]) == 2
    assert said in capsys.readouterr().err


class Served:
    """A server whose answers come when they are let go."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked, self.let_go = asyncio.Event(), asyncio.Event()
        self.opened: list[asyncio.StreamWriter] = []

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The fixture closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.opened.append(writer)
        writer.write(sent)
        return reader, writer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.set()
        await self.let_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    listening = server.listen("127.0.0.1", None, 0)
    made = Served(ports.number(listening))
    running = server.Server(server.config_of(made))
    task = asyncio.ensure_future(running.serve([listening]))
    yield made
    for writer in made.opened:
        writer.close()
    running.should_exit = running.force_exit = True
    await task


REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_connections_without_a_request_are_closed_and_answers_are_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, _ = await served.connect(REQUEST)
    async with asyncio.timeout(30):
        await served.asked.wait()
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
        for sent in (b"", REQUEST[:-2]):
            silent, _ = await served.connect(sent)
            assert await silent.read() == b""
        served.let_go.set()
        assert (await asking.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_rest_of_a_request_that_does_not_come_closes_the_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = await served.connect(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
    async with asyncio.timeout(30):
        await served.asked.wait()
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
        served.let_go.set()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"x")
        assert await reader.read() == b""


async def test_long_headers_are_refused(served: Served) -> None:
    reader, _ = await served.connect(b"GET /" + b"x" * (70 << 10))
    async with asyncio.timeout(30):
        assert b"400" in await reader.readuntil(b"\r\n")
