"""Fills each place of a gateway where requests wait, as one tenant, while another tenant uses it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from harness.several_kinds import sound
from harness.waiting import until

CHAT, SPEECH = "chat", "hears"
"""The models of the deployment."""
COMPLETIONS, RESPONSES, FILES, BATCHES = "/v1/completions", "/v1/responses", "/v1/files", "/v1/batches"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
LONG_TOKENS = 20_000
SIZES = (
    *(25 << 20,) * 8,
    *(20 << 20,) * 4,
    *(5 << 20,) * 4,
    *(1 << 20,) * 4,
    *(100_000,) * 20,
    *(8000,) * 20,
)
"""Of bodies that are announced and never come: whatever room is left, one of them fits into it."""
HUGE = ("1e300", "9e18", "1" + "0" * 30, "-1000000000000")
IsOccupied = Callable[[], bool]
"""Whether the first tenant still fills the place."""


@dataclass(frozen=True)
class Place:
    """Where requests wait for something that others may take."""

    name: str
    limits: tuple[str, ...]
    """Of the key of the tenant that fills it."""
    occupy: Callable[[httpx.Client], contextlib.AbstractContextManager[IsOccupied]]
    use: Callable[[httpx.Client], None]
    """Fails unless the second tenant gets what it came for."""


def completion(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post(COMPLETIONS, json={"model": CHAT, "prompt": "one", "max_tokens": 3, **more})


def answered(client: httpx.Client) -> None:
    for _ in range(10):
        reply = completion(client)
        assert reply.status_code == 200, reply.text


# --- batches ---------------------------------------------------------------------------------------------


def begin_batch(client: httpx.Client, count: int) -> str:
    body = {"model": CHAT, "prompt": "one", "max_tokens": 3}
    lines = [
        json.dumps({"custom_id": f"c{n}", "method": "POST", "url": COMPLETIONS, "body": body})
        for n in range(count)
    ]
    form = {"file": ("in.jsonl", "\n".join(lines))}
    reply = client.post(FILES, files=form, data={"purpose": "batch"})
    assert reply.status_code == 200, reply.text
    new = {"input_file_id": reply.json()["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    reply = client.post(BATCHES, json=new)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def status_of(client: httpx.Client, batch_id: str) -> str:
    return str(client.get(f"{BATCHES}/{batch_id}").json()["status"])


@contextlib.contextmanager
def batches_that_wait(client: httpx.Client) -> Iterator[IsOccupied]:
    """Their key's limits let a line pass each minute."""
    ids = [begin_batch(client, 20) for _ in range(5)]
    until("batches that wait", lambda: status_of(client, ids[0]) == "in_progress", 120)
    try:
        yield lambda: all(status_of(client, one) in ("validating", "in_progress") for one in ids)
    finally:
        for batch_id in ids:
            client.post(f"{BATCHES}/{batch_id}/cancel")


def batch_is_done(client: httpx.Client) -> None:
    batch_id = begin_batch(client, 1)
    until("the batch of another tenant", lambda: status_of(client, batch_id) == "completed", 120, every=0.1)


# --- background responses --------------------------------------------------------------------------------


def begin_response(client: httpx.Client, tokens: int) -> str:
    body = {"model": CHAT, "input": "x", "background": True, "max_output_tokens": tokens}
    reply = client.post(RESPONSES, json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def response_status(client: httpx.Client, response_id: str) -> str:
    return str(client.get(f"{RESPONSES}/{response_id}").json()["status"])


@contextlib.contextmanager
def long_responses(client: httpx.Client) -> Iterator[IsOccupied]:
    ids = [begin_response(client, LONG_TOKENS) for _ in range(24)]
    until("long responses", lambda: response_status(client, ids[0]) == "in_progress", 120)
    try:
        yield lambda: all(response_status(client, one) in ("queued", "in_progress") for one in ids)
    finally:
        for response_id in ids:
            client.post(f"{RESPONSES}/{response_id}/cancel")


def response_is_done(client: httpx.Client) -> None:
    response_id = begin_response(client, 5)
    ended = ("completed", "incomplete")
    until("the response of another tenant", lambda: response_status(client, response_id) in ended, 120)


# --- uploads ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def slow_uploads(client: httpx.Client, path: str, content_type: str) -> Iterator[IsOccupied]:
    """Connections that announce a large body and send a few bytes of it."""
    url, key = urlsplit(str(client.base_url)), client.headers["authorization"]
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {url.netloc}\r\nauthorization: {key}\r\n"
        f"content-type: {content_type}\r\ncontent-length: "
    )
    with contextlib.ExitStack() as ends:
        connections = []
        for size in SIZES:
            connection = ends.enter_context(
                socket.create_connection((url.hostname or "", url.port or 80), timeout=60)
            )
            connection.sendall(f"{head}{size}\r\n\r\n--edg".encode())
            connections.append(connection)
        yield lambda: any(map(is_open, connections))


def is_open(connection: socket.socket) -> bool:
    """Return whether nothing came back: the other side waits for the rest of the body."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
        return False
    except BlockingIOError:
        return True


def forms(path: str) -> Callable[[httpx.Client], contextlib.AbstractContextManager[IsOccupied]]:
    return lambda client: slow_uploads(client, path, "multipart/form-data; boundary=edge")


def long_bodies(client: httpx.Client) -> contextlib.AbstractContextManager[IsOccupied]:
    return slow_uploads(client, COMPLETIONS, "application/json")


def file_is_uploaded(client: httpx.Client) -> None:
    reply = client.post(FILES, files={"file": ("f", b"x" * 1000)}, data={"purpose": "batch"})
    assert reply.status_code == 200, reply.text


def speech_is_transcribed(client: httpx.Client) -> None:
    reply = client.post(TRANSCRIPTIONS, files={"file": ("f.wav", sound(1))}, data={"model": SPEECH})
    assert reply.status_code == 200, reply.text


# --- limits ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_the_background(act: Callable[[], object], threads: int = 4) -> Iterator[IsOccupied]:
    """Repeat something until the end of the context."""
    ending = threading.Event()

    def repeat() -> None:
        while not ending.is_set():
            with contextlib.suppress(httpx.HTTPError):
                act()

    running = [threading.Thread(target=repeat) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield lambda: all(thread.is_alive() for thread in running)
    finally:
        ending.set()
        for thread in running:
            thread.join(120)


def huge_numbers(client: httpx.Client) -> contextlib.AbstractContextManager[IsOccupied]:
    numbers = iter(HUGE * 100_000)

    def act() -> None:
        body = f'{{"model": "{CHAT}", "prompt": "x", "max_tokens": {next(numbers)}}}'
        client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})

    return in_the_background(act)


def requests_for_one_seat(client: httpx.Client) -> contextlib.AbstractContextManager[IsOccupied]:
    return in_the_background(lambda: completion(client, max_tokens=200, ignore_eos=True), 40)


PLACES = (
    Place("batches", ("--tokens-per-minute", "30"), batches_that_wait, batch_is_done),
    Place("background", (), long_responses, response_is_done),
    Place("files", (), forms(FILES), file_is_uploaded),
    Place("speech", ("--requests-per-minute", "1000"), forms(TRANSCRIPTIONS), speech_is_transcribed),
    Place("bodies", (), long_bodies, answered),
    Place("limits", ("--requests-per-minute", "1000000"), huge_numbers, answered),
    Place("seats", ("--concurrent", "1"), requests_for_one_seat, answered),
)
