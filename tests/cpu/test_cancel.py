"""Tests that a disconnected client frees the engine within a second: queued, in prefill and in decode."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections.abc import Iterator

import httpx

from cpu.completions import body, complete
from cpu.pairs import IN_FLIGHT
from harness.stack import Stack
from harness.waiting import Promptness, until

TIMES = 11


@contextlib.contextmanager
def open_stream(made: Stack, prompt: list[int], max_tokens: int) -> Iterator[httpx.Response]:
    """Opens a streamed request; leaving the block closes the connection."""
    with (
        httpx.Client(timeout=30) as client,
        client.stream(
            "POST", f"{made.url}/v1/completions", json=body(prompt, max_tokens, stream=True)
        ) as response,
    ):
        yield response


class Abandoned:
    """Is a request that nobody waits for; `leave` closes its connection."""

    def __init__(self, made: Stack, prompt: list[int], max_tokens: int) -> None:
        content = json.dumps(body(prompt, max_tokens, stream=True)).encode()
        self._socket = socket.create_connection(("127.0.0.1", made.port))
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + content)
        self._came = b""

    def has_ended(self) -> bool:
        """Reads what came; true when it was the whole answer."""
        with contextlib.suppress(BlockingIOError):
            self._came += self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
        return b"data: [DONE]" in self._came

    def leave(self) -> None:
        self._socket.close()


def is_empty(made: Stack) -> bool:
    return made.workers[0].busy() == 0 and in_flight(made) == 0


def in_flight(made: Stack) -> int:
    return int(made.workers[0].metric(IN_FLIGHT))


def test_client_gone_in_decode(narrow: Stack) -> None:
    freed = Promptness()
    for number in range(TIMES):
        with open_stream(narrow, [20 + number] * 5, 1500) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            assert narrow.workers[0].busy() == 1
        freed.until("an empty engine", lambda: is_empty(narrow))
    freed.assert_within(1.0)


def test_client_gone_in_prefill(narrow: Stack) -> None:
    freed, numbers = Promptness(), itertools.count()
    for _ in range(TIMES):
        in_prefill(narrow, numbers).leave()
        freed.until("an empty engine", lambda: is_empty(narrow))
    freed.assert_within(1.0)


def in_prefill(made: Stack, numbers: Iterator[int]) -> Abandoned:
    """Asks repeatedly, with new prompts: one request may end before anybody has seen it."""
    asked: list[Abandoned] = []

    def is_seen() -> bool:
        if asked and asked[-1].has_ended():
            asked.pop().leave()
        if not asked:
            first = next(numbers) * 37
            asked.append(Abandoned(made, [(first + i) % 800 + 10 for i in range(1900)], 100))
        return in_flight(made) == 1

    until("a running prefill", is_seen)
    return asked[-1]


def test_client_gone_while_queued(narrow: Stack) -> None:
    freed = Promptness()
    for number in range(TIMES):
        with open_stream(narrow, [20 + number] * 5, 1500) as response:
            lines = response.iter_lines()  # kept: dropping it would close the stream
            next(lines)
            request = Abandoned(narrow, [40 + number] * 7, 4)
            until("a queued request", lambda: narrow.workers[0].busy() == 2 and in_flight(narrow) == 2)
            request.leave()
            freed.until("an empty queue", lambda: narrow.workers[0].busy() == 1)
        until("an empty engine", lambda: is_empty(narrow))
    freed.assert_within(1.0)


def test_next_request_is_right_after_all_that(narrow: Stack) -> None:
    first, second = (complete(narrow, [30, 31, 32]).text for _ in range(2))
    assert first == second != ""
