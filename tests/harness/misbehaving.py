"""Clients that do harm: that do not read, that come in crowds, that ask for what cannot be made."""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from harness.stack import Stack
from harness.waiting import until_async


@contextlib.contextmanager
def stalled(deployment: Stack, **more: object) -> Iterator[None]:
    """A client that asks for a long answer and does not read it."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": 500_000,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        **more,
    }
    content = json.dumps(body).encode()
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect((deployment.address, deployment.port))
        client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + content)
        assert b" 200 " in client.recv(100)
        yield


class Streams:
    """Many at once, which are read until they are left."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.statuses: Counter[int] = Counter()
        self.lines = 0
        self._is_left = False

    async def one(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            if answer.status_code == 200:
                await anext(lines)
            self.statuses[answer.status_code] += 1
            while answer.status_code == 200 and not self._is_left:
                await anext(lines)
                self.lines += 1

    async def seen(self, count: int) -> None:
        """Returns when so many have been answered."""
        await until_async(f"{count} answers", lambda: self.statuses.total() >= count, 200)

    def leave(self) -> None:
        self._is_left = True


def some_of(k: int, stem: str = "p") -> dict[str, Any]:
    """A schema that takes a compiler time and memory without end: some of k properties."""
    properties = {f"{stem}{i}": {"type": "integer"} for i in range(k)}
    return {"type": "object", "properties": properties, "minProperties": k // 4, "maxProperties": k // 2}
