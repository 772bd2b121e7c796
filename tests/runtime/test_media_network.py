"""Servers that misbehave, over real HTTP: each is refused with its status, in its time, in little memory."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import ssl
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.errors import MediaRefused, Overloaded
from dynamo_vllm.media.base import MEGABYTE, MediaItem, MediaLimits, MediaRef
from dynamo_vllm.media.fetch.addresses import Reach
from dynamo_vllm.media.loader import Loader
from harness import media
from harness.bad_server import (
    Answer,
    BadServer,
    bad_server,
    chunked,
    cut,
    drip,
    head,
    make_certificate,
    silent,
    whole,
)
from harness.waiting import until_async
from runtime.conftest import LOOPBACK, MakeLoader

PNG = media.picture()
LIMITS = MediaLimits(max_bytes=2 * MEGABYTE, timeout_seconds=60, redirects=2)
HASTY = replace(LIMITS, timeout_seconds=0.6)
"""For what is to end by time and by nothing else."""
LATE = "not loaded within 0.6 s"
MOST_MEMORY = 8 * LIMITS.max_bytes
GIGABYTE = 1 << 30


async def names_are_here(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


@pytest.fixture
def loader(make: MakeLoader) -> Loader:
    return make(LIMITS)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Without more memory than a few times the limit of bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


async def fetch(loader: Loader, url: str) -> MediaItem:
    return await asyncio.wait_for(loader.load(MediaRef("image", url)), 60)


async def refused(loader: Loader, url: str, status: int, match: str) -> None:
    with bounded(), pytest.raises(MediaRefused, match=match) as caught:
        await fetch(loader, url)
    assert caught.value.status == status
    assert str(caught.value).startswith("image 1 of 1: ")


async def left(*tasks: asyncio.Future[Any]) -> None:
    """Their clients go away."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_picture_comes_over_http(server: BadServer, loader: Loader) -> None:
    item = await fetch(loader, server.file("/a", PNG))
    again = await fetch(loader, server.file("/b", PNG, "Content-Type: text/html"))
    assert item is again, "the same content under another name is decoded once"
    sent = server.requests[0].lower()
    assert b"accept-encoding: identity" in sent
    assert b"cookie" not in sent and b"authorization" not in sent


async def test_redirects_are_followed_up_to_the_limit(server: BadServer, loader: Loader) -> None:
    server.file("/3", PNG)
    server.redirect("/2", "/3")
    server.redirect("/1", server.url("/2"), 308)
    await fetch(loader, server.url("/1"))
    await refused(loader, server.redirect("/0", "/1"), 400, "redirected more than 2 times")
    await refused(loader, server.redirect("/loop", "/loop"), 400, "redirected more than 2 times")


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "localhost.", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
        *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "0.0.0.0", "[::]", "2130706433", "0x7f000001"),
        *("017700000001", "0177.0.0.1", "127.1", "127。0。0。1"),
    ],
)
async def test_loopback_is_not_asked(server: BadServer, make: MakeLoader, host: str) -> None:
    """As a worker is without any flag."""
    server.file("/a", PNG)
    await refused(make(LIMITS, reach=Reach()), server.url("/a", host), 400, "host|not a URL")
    assert server.requests == [], "nothing was sent"


async def test_private_and_metadata_addresses_are_not_asked(server: BadServer, make: MakeLoader) -> None:
    """Of each kind one; tests/unit/media/fetch has all of them."""
    for host in ("169.254.169.254", "10.0.0.1", "224.0.0.1", "[fe80::1]", "[fd00:ec2::254]"):
        await refused(make(LIMITS, reach=Reach()), f"http://{host}/", 400, "may not fetch from its address")
    for to in ("http://10.0.0.1/a", "http://169.254.169.254/", "//192.168.0.1/a"):
        await refused(make(LIMITS), server.redirect("/a", to), 400, "may not fetch from its address")


@pytest.mark.parametrize(
    ("to", "match"),
    [
        ("file:///etc/passwd", "file: is not supported"),
        ("data:image/png;base64,AAAA", "data: is not supported"),
        ("http://user:secret@127.0.0.1/a", "user name or password"),
        ("http://2130706433/", "unusual form"),
        ("http://[", "not a URL|no valid host or port"),
        ("http://a%62c/", "no valid host or port"),
    ],
)
async def test_redirect_goes_to_http_only(server: BadServer, loader: Loader, to: str, match: str) -> None:
    await refused(loader, server.redirect("/a", to), 400, match)


async def test_name_that_changes_after_the_check_changes_nothing(server: BadServer, make: MakeLoader) -> None:
    """The first answer is allowed, every later one is the metadata service: DNS is asked once."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    server.file("/a", PNG)
    await fetch(make(LIMITS, reach=replace(LOOPBACK, resolve=resolve)), server.url("/a", "changing.example"))
    assert asked == ["changing.example"]
    assert b"Host: changing.example:" in server.requests[0]


async def test_name_with_one_private_address_among_others_is_not_asked(
    server: BadServer, make: MakeLoader
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1", "10.0.0.1"]

    server.file("/a", PNG)
    loader = make(LIMITS, reach=replace(LOOPBACK, resolve=resolve))
    await refused(loader, server.url("/a", "mixed.example"), 400, "may not fetch from its address")
    assert server.requests == []


async def test_name_server_that_never_answers_ends_in_time(make: MakeLoader) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    await refused(make(HASTY, Reach(resolve=resolve)), "http://slow.example/", 400, LATE)


async def test_only_named_hosts_are_asked_where_some_are_named(server: BadServer, make: MakeLoader) -> None:
    loader = make(LIMITS, reach=replace(LOOPBACK, hosts=("a.example", "*.b.example"), resolve=names_are_here))
    server.file("/a", PNG)
    for host in ("a.example", "A.EXAMPLE", "x.b.example"):
        await fetch(loader, server.url("/a", host))
    server.redirect("/out", server.url("/a", "c.example"))
    for url in (server.url("/a", "evil-b.example"), server.url("/a"), server.url("/out", "a.example")):
        await refused(loader, url, 400, "not among those")


async def test_proxies_of_the_environment_are_not_used(
    server: BadServer, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    await fetch(loader, server.file("/a", PNG))


MANY_HEADERS = [f"X-{n}: {'y' * 1000}" for n in range(300)]
CLOSED = "closed the connection"
BAD: dict[str, tuple[Answer, int, str]] = {
    "slow drip": (drip(PNG * 100, 0.05), 400, LATE),
    "never a byte": (silent, 400, f"{LATE}|did not answer"),
    "head and never a body": (head("200 OK", "Content-Length: 10"), 400, f"{LATE}|did not answer"),
    "endless small chunks": (chunked(b"x", None, 0.01), 400, LATE),
    "endless body": (chunked(bytes(1 << 16)), 413, "larger than 2 MB"),
    "a gigabyte announced": (head("200 OK", f"Content-Length: {GIGABYTE}"), 413, "larger than 2 MB"),
    "a gigabyte in chunks": (chunked(bytes(1 << 20), GIGABYTE >> 20), 413, "larger than 2 MB"),
    "endless header": (head("200 OK", *MANY_HEADERS), 400, CLOSED),
    "no HTTP": (head("nonsense"), 400, CLOSED),
    "cut off": (cut(PNG[:50], len(PNG)), 400, CLOSED),
    "less than announced": (cut(PNG, len(PNG) + 10), 400, CLOSED),
    "not found": (head("404 Not Found", "Content-Length: 0"), 400, "status 404"),
    "server error": (head("500 Oops", "Content-Length: 0"), 400, "status 500"),
    "part of it": (head("206 Partial", "Content-Length: 0"), 400, "status 206"),
    "nowhere": (head("302 Found", "Content-Length: 0"), 400, "without a location"),
    "gzip": (whole(gzip.compress(bytes(50 << 20)), "Content-Encoding: gzip"), 415, "sent compressed data"),
    "gzip without saying so": (whole(gzip.compress(PNG)), 415, "this is compressed"),
}


@pytest.mark.parametrize("name", BAD)
async def test_server_that_misbehaves_is_left(server: BadServer, make: MakeLoader, name: str) -> None:
    answer, status, match = BAD[name]
    loader = make(LIMITS)
    await refused(make(HASTY) if LATE in match else loader, server.serve("/a", answer), status, match)
    assert await fetch(loader, server.file("/b", PNG)), "the next one is served"


async def test_server_that_is_not_there_is_a_400(loader: Loader) -> None:
    async with bad_server() as other:
        url = other.url("/a")
    await refused(loader, url, 400, "cannot be reached")


async def test_https_is_checked_against_the_name_though_the_address_is_dialled(
    make: MakeLoader, tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path, "media.example")
    trusted = ssl.create_default_context(cafile=str(certificate))
    known = make(LIMITS, reach=replace(LOOPBACK, resolve=names_are_here, tls=trusted))
    unknown = make(LIMITS, reach=replace(LOOPBACK, resolve=names_are_here))
    async with bad_server(certificate) as server:
        server.file("/a", PNG)
        await fetch(known, server.url("/a", "media.example", "https"))
        await refused(known, server.url("/a", "other.example", "https"), 400, "cannot be reached")
        await refused(unknown, server.url("/a", "media.example", "https"), 400, "cannot be reached")


async def test_server_that_speaks_no_tls_ends_in_time_and_keeps_no_socket(
    server: BadServer, make: MakeLoader
) -> None:
    await refused(make(HASTY), server.url("/a", scheme="https"), 400, f"cannot be reached|{LATE}")
    await until_async("its end", lambda: bool(server.peers_gone))


async def test_first_error_ends_the_other_fetches(server: BadServer, loader: Loader) -> None:
    slow = server.serve("/slow", silent)
    gone = server.serve("/gone", head("404 Not Found", "Content-Length: 0"))
    with pytest.raises(MediaRefused, match="image 2 of 2: the server answered with status 404"):
        async with asyncio.timeout(LIMITS.timeout_seconds / 2):
            await loader.load_all([MediaRef("image", slow), MediaRef("image", gone)])


async def test_request_of_slow_urls_leaves_room_for_others(server: BadServer, make: MakeLoader) -> None:
    loader = make(LIMITS, at_once=16)
    slow = MediaRef("image", server.serve("/slow", silent))
    held = asyncio.create_task(loader.load_all([slow] * 16))
    await until_async("a request", lambda: bool(server.requests))
    assert (await fetch(loader, server.file("/a", PNG))).kind == "image"
    assert not held.done()
    await left(held)


async def test_slow_host_leaves_room_for_others(server: BadServer, make: MakeLoader) -> None:
    """Of eight slots servers have four, and one host two; without its limit it would have all four."""
    loader = make(LIMITS, reach=replace(LOOPBACK, resolve=names_are_here), at_once=8)
    server.serve("/slow", silent)
    server.file("/a", PNG)
    slow = [server.url("/slow", host) for host in ("slow.example", "slow.example.", "SLOW.example") * 2]
    held = [asyncio.create_task(fetch(loader, url)) for url in slow]
    await until_async("two requests", lambda: len(server.requests) == 2)
    for _ in range(3):
        await fetch(loader, server.url("/a", "quick.example"))
    assert len(server.requests) == 5
    await left(*held)
    assert (await fetch(loader, server.url("/a", "slow.example"))).kind == "image"


async def test_many_requests_wait_for_their_turn_and_are_served(server: BadServer, make: MakeLoader) -> None:
    """One at a time: the first takes all the time it may, and the others have waited as long."""
    loader = make(replace(LIMITS, timeout_seconds=1.5), at_once=1)
    slow = asyncio.create_task(fetch(loader, server.serve("/slow", silent)))
    await until_async("a request", lambda: len(server.requests) == 1)
    url = server.file("/a", PNG)
    others = [asyncio.create_task(fetch(loader, url)) for _ in range(5)]
    with pytest.raises(MediaRefused, match="within 1.5 s"):
        await slow
    assert {item.kind for item in await asyncio.gather(*others)} == {"image"}


async def test_servers_that_hold_all_turns_are_not_the_fault_of_others(
    server: BadServer, make: MakeLoader
) -> None:
    loader = make(replace(LIMITS, queue_seconds=0.2), at_once=1)
    slow = asyncio.create_task(fetch(loader, server.serve("/slow", silent)))
    await until_async("a request", lambda: len(server.requests) == 1)
    with pytest.raises(Overloaded, match="image 1 of 1: waited more than 0.2 s"):
        await fetch(loader, server.file("/a", PNG))
    await left(slow)
    assert (await fetch(loader, server.url("/a"))).kind == "image"


async def test_request_that_is_cancelled_hangs_up(server: BadServer, loader: Loader) -> None:
    task = asyncio.create_task(fetch(loader, server.serve("/a", chunked(b"x", None, 0.01))))
    await until_async("a request", lambda: bool(server.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_async("its end", lambda: bool(server.peers_gone))


async def test_clients_that_leave_take_no_connection_with_them(server: BadServer, make: MakeLoader) -> None:
    """httpcore 1.0 loses a connection whose request is cancelled between connecting and sending."""
    loader = make(LIMITS, at_once=8)
    refs = [MediaRef("image", server.file(f"/{number}", PNG)) for number in range(8)]
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        task = asyncio.create_task(loader.load_all(refs))
        for _ in range(number % 40):
            await asyncio.sleep(0)  # as many turns of the loop as it takes to be anywhere in between
        await left(task)
    await until_async("their end", lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert (await fetch(loader, refs[0].url)).kind == "image"
