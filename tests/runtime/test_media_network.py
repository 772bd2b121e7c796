"""Servers that misbehave, over real HTTP: each is refused with its status, in its time, in little memory."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import os
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_vllm.errors import MediaRefused, Overloaded
from dynamo_vllm.media.base import MEGABYTE, MediaItem, MediaLimits, MediaRef
from dynamo_vllm.media.fetch.addresses import Reach
from dynamo_vllm.media.loader import Loader, make_loader
from harness import media
from harness.bad_server import (
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

PNG = media.picture()
LIMITS = MediaLimits(max_bytes=2 * MEGABYTE, timeout_seconds=60, redirects=2)
HASTY = replace(LIMITS, timeout_seconds=1.5)
"""For what is to end by time and by nothing else."""
LOOPBACK = Reach(networks=(ipaddress.ip_network("127.0.0.0/8"),))
MOST_MEMORY = 8 * LIMITS.max_bytes
GIGABYTE = 1 << 30


@pytest.fixture
async def server() -> AsyncIterator[BadServer]:
    async with bad_server() as made:
        yield made


@pytest.fixture
async def loader() -> AsyncIterator[Loader]:
    """May ask loopback, where the test's servers are."""
    made = make_loader(LIMITS, reach=LOOPBACK)
    yield made
    await made.aclose()


@pytest.fixture
async def careful() -> AsyncIterator[Loader]:
    """As a worker is without any flag."""
    made = make_loader(LIMITS)
    yield made
    await made.aclose()


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Without more memory than a few times the limit of bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


async def refused(loader: Loader, url: str, status: int, match: str) -> None:
    with bounded(), pytest.raises(MediaRefused, match=match) as caught:
        await loader.load(MediaRef("image", url))
    assert caught.value.status == status
    assert str(caught.value).startswith("image 1 of 1: ")


async def test_picture_comes_over_http(server: BadServer, loader: Loader) -> None:
    item = await loader.load(MediaRef("image", server.file("/a", PNG)))
    again = await loader.load(MediaRef("image", server.file("/b", PNG, "Content-Type: text/html")))
    assert item is again, "the same content under another name is decoded once"
    sent = server.requests[0].lower()
    assert b"accept-encoding: identity" in sent
    assert b"cookie" not in sent and b"authorization" not in sent


async def test_redirects_are_followed_up_to_the_limit(server: BadServer, loader: Loader) -> None:
    server.file("/3", PNG)
    server.redirect("/2", "/3")
    server.redirect("/1", server.url("/2"), 308)
    await loader.load(MediaRef("image", server.url("/1")))
    await refused(loader, server.redirect("/0", "/1"), 400, "redirected more than 2 times")
    await refused(loader, server.redirect("/loop", "/loop"), 400, "redirected more than 2 times")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "localhost.",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "0.0.0.0",
        "[::]",
        "2130706433",
        "0x7f000001",
        "017700000001",
        "0177.0.0.1",
        "127.1",
        "127。0。0。1",
    ],
)
async def test_loopback_is_not_asked(server: BadServer, careful: Loader, host: str) -> None:
    server.file("/a", PNG)
    await refused(careful, server.url("/a", host), 400, "host|not a URL")
    assert server.requests == [], "nothing was sent"


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[fd00:ec2::254]/latest/meta-data/",
        "http://100.100.100.200/",
        "http://10.0.0.1/",
        "http://172.16.0.1/",
        "http://192.168.1.1/",
        "http://100.64.0.1/",
        "http://224.0.0.1/",
        "http://255.255.255.255/",
        "http://[fe80::1]/",
        "http://[ff02::1]/",
        "https://[fc00::1]/",
        "http://198.18.0.1/",
        "http://192.0.2.1/",
    ],
)
async def test_private_and_metadata_addresses_are_not_asked(careful: Loader, url: str) -> None:
    await refused(careful, url, 400, "may not fetch from its address")


@pytest.mark.parametrize("to", ["http://10.0.0.1/a", "http://169.254.169.254/", "//192.168.0.1/a"])
async def test_redirect_to_a_private_address_is_not_followed(
    server: BadServer, loader: Loader, to: str
) -> None:
    await refused(loader, server.redirect("/a", to), 400, "may not fetch from its address")


@pytest.mark.parametrize(
    ("to", "match"),
    [
        ("file:///etc/passwd", "file: is not supported"),
        ("data:image/png;base64,AAAA", "data: is not supported"),
        ("ftp://127.0.0.1/a", "ftp: is not supported"),
        ("http://user:secret@127.0.0.1/a", "user name or password"),
        ("http://2130706433/", "unusual form"),
        ("http://[", "not a URL|no valid host or port"),
        ("http://a%62c/", "no valid host or port"),
    ],
)
async def test_redirect_goes_to_http_only(server: BadServer, loader: Loader, to: str, match: str) -> None:
    await refused(loader, server.redirect("/a", to), 400, match)


async def test_name_that_changes_after_the_check_changes_nothing(server: BadServer) -> None:
    """The first answer is allowed, every later one is the metadata service: DNS is asked once."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    loader = make_loader(LIMITS, reach=replace(LOOPBACK, resolve=resolve))
    server.file("/a", PNG)
    await loader.load(MediaRef("image", server.url("/a", "changing.example")))
    assert asked == ["changing.example"]
    assert b"Host: changing.example:" in server.requests[0]
    await loader.aclose()


async def test_name_with_one_private_address_among_others_is_not_asked(server: BadServer) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1", "10.0.0.1"]

    loader = make_loader(LIMITS, reach=replace(LOOPBACK, resolve=resolve))
    server.file("/a", PNG)
    await refused(loader, server.url("/a", "mixed.example"), 400, "may not fetch from its address")
    assert server.requests == []
    await loader.aclose()


async def test_name_server_that_never_answers_ends_in_time() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    loader = make_loader(HASTY, reach=Reach(resolve=resolve))
    await refused(loader, "http://slow.example/", 400, "not loaded within 1.5 s")
    await loader.aclose()


async def test_only_named_hosts_are_asked_where_some_are_named(server: BadServer) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    reach = replace(LOOPBACK, hosts=("a.example", "*.b.example"), resolve=resolve)
    loader = make_loader(LIMITS, reach=reach)
    server.file("/a", PNG)
    for host in ("a.example", "A.EXAMPLE", "x.b.example"):
        await loader.load(MediaRef("image", server.url("/a", host)))
    for host in ("b.example", "evil-b.example", "a.example.evil.org", "127.0.0.1"):
        await refused(loader, server.url("/a", host), 400, "not among those")
    server.redirect("/out", server.url("/a", "c.example"))
    await refused(loader, server.url("/out", "a.example"), 400, "not among those")
    await loader.aclose()


async def test_proxies_of_the_environment_are_not_used(
    server: BadServer, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    await loader.load(MediaRef("image", server.file("/a", PNG)))


SLOW: dict[str, tuple[Callable[[asyncio.StreamWriter], Awaitable[None]], int, str]] = {
    "slow drip": (drip(PNG * 100, 0.05), 400, "not loaded within 1.5 s"),
    "never a byte": (silent, 400, "not loaded within 1.5 s|did not answer"),
    "head and never a body": (
        head("200 OK", "Content-Length: 10"),
        400,
        "within 1.5 s|did not answer",
    ),
    "endless small chunks": (chunked(b"x", None, 0.01), 400, "not loaded within 1.5 s"),
    "endless body": (chunked(bytes(1 << 16)), 413, "larger than 2 MB"),
    "a gigabyte announced": (head("200 OK", f"Content-Length: {GIGABYTE}"), 413, "larger than 2 MB"),
    "a gigabyte in chunks": (chunked(bytes(1 << 20), GIGABYTE >> 20), 413, "larger than 2 MB"),
    "endless header": (
        head("200 OK", *(f"X-{n}: {'y' * 1000}" for n in range(300))),
        400,
        "closed the connection",
    ),
    "no HTTP": (head("nonsense"), 400, "closed the connection"),
    "cut off": (cut(PNG[:50], len(PNG)), 400, "closed the connection"),
    "less than announced": (cut(PNG, len(PNG) + 10), 400, "closed the connection"),
    "not found": (head("404 Not Found", "Content-Length: 0"), 400, "status 404"),
    "server error": (head("500 Oops", "Content-Length: 0"), 400, "status 500"),
    "part of it": (head("206 Partial", "Content-Length: 0"), 400, "status 206"),
    "nowhere": (head("302 Found", "Content-Length: 0"), 400, "without a location"),
    "gzip": (
        whole(gzip.compress(bytes(50 * MEGABYTE)), "Content-Encoding: gzip"),
        415,
        "sent compressed data",
    ),
    "gzip without saying so": (whole(gzip.compress(PNG)), 415, "this is compressed"),
}


@pytest.mark.parametrize("name", SLOW)
async def test_server_that_misbehaves_is_left(server: BadServer, loader: Loader, name: str) -> None:
    answer, status, match = SLOW[name]
    hasty = make_loader(HASTY, reach=LOOPBACK)
    await refused(hasty if "within" in match else loader, server.serve("/a", answer), status, match)
    await hasty.aclose()
    assert await loader.load(MediaRef("image", server.file("/b", PNG))), "the next one is served"


async def test_server_that_is_not_there_is_a_400(loader: Loader, server: BadServer) -> None:
    async with bad_server() as other:
        url = other.url("/a")
    await refused(loader, url, 400, "cannot be reached")


async def test_https_is_checked_against_the_name_though_the_address_is_dialled(tmp_path: Path) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    certificate = make_certificate(tmp_path, "media.example")
    trusted = ssl.create_default_context(cafile=str(certificate))
    known = make_loader(LIMITS, reach=replace(LOOPBACK, resolve=resolve, tls=trusted))
    unknown = make_loader(LIMITS, reach=replace(LOOPBACK, resolve=resolve))
    async with bad_server(certificate) as server:
        server.file("/a", PNG)
        await known.load(MediaRef("image", server.url("/a", "media.example", "https")))
        await refused(known, server.url("/a", "other.example", "https"), 400, "cannot be reached")
        await refused(unknown, server.url("/a", "media.example", "https"), 400, "cannot be reached")
        await known.aclose()
        await unknown.aclose()


async def test_server_that_speaks_no_tls_ends_in_time_and_keeps_no_socket(server: BadServer) -> None:
    loader = make_loader(HASTY, reach=LOOPBACK)
    await refused(loader, server.url("/a", scheme="https"), 400, "cannot be reached|not loaded within")
    await until_async("its end", lambda: bool(server.peers_gone))
    await loader.aclose()


async def test_first_error_ends_the_other_fetches(server: BadServer, loader: Loader) -> None:
    slow = server.serve("/slow", silent)
    gone = server.serve("/gone", head("404 Not Found", "Content-Length: 0"))
    with pytest.raises(MediaRefused, match="image 2 of 2: the server answered with status 404"):
        async with asyncio.timeout(LIMITS.timeout_seconds / 2):
            await loader.load_all([MediaRef("image", slow), MediaRef("image", gone)])


async def test_request_of_slow_urls_leaves_room_for_others(server: BadServer) -> None:
    loader = make_loader(LIMITS, reach=LOOPBACK, at_once=16)
    slow = MediaRef("image", server.serve("/slow", silent))
    held = asyncio.create_task(loader.load_all([slow] * 16))
    await until_async("a request", lambda: bool(server.requests))
    item: MediaItem = await asyncio.wait_for(loader.load(MediaRef("image", server.file("/a", PNG))), 30)
    assert item.kind == "image"
    assert not held.done()
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    await loader.aclose()


async def names_are_here(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


async def test_slow_host_leaves_room_for_others(server: BadServer) -> None:
    """Of eight slots servers have four, and one host two; without its limit it would have all four."""
    reach = replace(LOOPBACK, resolve=names_are_here)
    loader = make_loader(LIMITS, reach=reach, at_once=8)
    server.serve("/slow", silent)
    server.file("/a", PNG)
    slow = [server.url("/slow", host) for host in ("slow.example", "slow.example.", "SLOW.example") * 2]
    held = [asyncio.create_task(loader.load(MediaRef("image", url))) for url in slow]
    await until_async("two requests", lambda: len(server.requests) == 2)
    for _ in range(3):
        await asyncio.wait_for(loader.load(MediaRef("image", server.url("/a", "quick.example"))), 30)
    assert len(server.requests) == 5
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert (await loader.load(MediaRef("image", server.url("/a", "slow.example")))).kind == "image"
    await loader.aclose()


async def test_many_requests_wait_for_their_turn_and_are_served(server: BadServer) -> None:
    """One at a time: the first takes all the time it may, and the others have waited as long."""
    loader = make_loader(HASTY, reach=LOOPBACK, at_once=1)
    slow = asyncio.create_task(loader.load(MediaRef("image", server.serve("/slow", silent))))
    await until_async("a request", lambda: len(server.requests) == 1)
    ref = MediaRef("image", server.file("/a", PNG))
    others = [asyncio.create_task(loader.load(ref)) for _ in range(5)]
    with pytest.raises(MediaRefused, match="within 1.5 s"):
        await slow
    assert {item.kind for item in await asyncio.gather(*others)} == {"image"}
    await loader.aclose()


async def test_servers_that_hold_all_turns_are_not_the_fault_of_others(server: BadServer) -> None:
    loader = make_loader(replace(LIMITS, queue_seconds=0.2), reach=LOOPBACK, at_once=1)
    slow = asyncio.create_task(loader.load(MediaRef("image", server.serve("/slow", silent))))
    await until_async("a request", lambda: len(server.requests) == 1)
    with pytest.raises(Overloaded, match="image 1 of 1: waited more than 0.2 s"):
        await loader.load(MediaRef("image", server.file("/a", PNG)))
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert (await loader.load(MediaRef("image", server.url("/a")))).kind == "image"
    await loader.aclose()


async def test_request_that_is_cancelled_hangs_up(server: BadServer, loader: Loader) -> None:
    task = asyncio.create_task(loader.load(MediaRef("image", server.serve("/a", chunked(b"x", None, 0.01)))))
    await until_async("a request", lambda: bool(server.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_async("its end", lambda: bool(server.peers_gone))


async def test_clients_that_leave_take_no_connection_with_them(server: BadServer) -> None:
    """httpcore 1.0 loses a connection whose request is cancelled between connecting and sending."""
    loader = make_loader(LIMITS, reach=LOOPBACK, at_once=8)
    refs = [MediaRef("image", server.file(f"/{number}", PNG)) for number in range(8)]
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        task = asyncio.create_task(loader.load_all(refs))
        for _ in range(number % 40):
            await asyncio.sleep(0)  # as many turns of the loop as it takes to be anywhere in between
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until_async("their end", lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert (await loader.load(refs[0])).kind == "image"
    await loader.aclose()
