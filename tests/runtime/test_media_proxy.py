"""Pictures by URL that the frontend looks at, through the real frontend and over real HTTP and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tiny_models.vision import make_tiny_vision_model

from cpu.vision import chat, image
from dynamo_vllm.media.fetch import proxy
from dynamo_vllm.media.fetch.addresses import Reach
from dynamo_vllm.media.fetch.proxy import Proxy
from harness import media
from harness.bad_server import BadServer, bad_server, make_certificate, silent
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import LOOPBACK, fake

PNG = media.picture()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model") / "tiny", "qwen2-vl")


@contextlib.contextmanager
def frontend(folder: Path, model: Path, *flags: str) -> Iterator[Stack]:
    """One that takes loopback for public, as it takes some private networks; and a worker that does not."""
    with stack(folder) as made:
        home = folder / "home"  # without files of an earlier model's card
        home.mkdir()
        made.start_frontend(*flags, env={"DYN_MM_ALLOW_INTERNAL": "1", "HOME": str(home)})
        made.start_worker(*fake(model, media={"image": 2}), "--enable-multimodal")
        yield made.wait_ready()


async def ask(made: Stack, url: str) -> httpx.Response:
    body = {"model": "tiny", "messages": chat([image(url)]), "max_tokens": 4}
    return await asyncio.to_thread(made.post, "/v1/chat/completions", body)


@pytest.mark.parametrize(
    ("flags", "fetched"),
    [
        ((), False),
        (("--media-networks", "127.0.0.0/8"), True),
        (("--media-networks", "127.0.0.0/8", "--media-hosts", "pictures.example"), False),
    ],
    ids=["private", "allowed", "another host"],
)
async def test_frontend_asks_nobody_whom_a_worker_may_not_ask(
    flags: tuple[str, ...], fetched: bool, server: BadServer, model: Path, tmp_path: Path
) -> None:
    url = server.file("/a.png", PNG)
    with frontend(tmp_path, model, *flags) as made:
        answer = await ask(made, url)
        assert answer.status_code == 400, "the worker may not ask it either"
        assert bool(server.requests) is fetched


@contextlib.asynccontextmanager
async def client(
    reach: Reach, environment: dict[str, str] | None = None, verify: ssl.SSLContext | bool = True
) -> AsyncIterator[httpx.AsyncClient]:
    made = Proxy(reach)
    url = made.variables(environment or {})["ALL_PROXY"]
    async with made.run(), httpx.AsyncClient(proxy=url, verify=verify, timeout=60) as asking:
        yield asking


async def test_what_may_be_asked_is_passed_on(server: BadServer) -> None:
    url = server.file("/a.png?b=c%20d", PNG, "Connection: keep-alive")
    async with client(LOOPBACK) as asking:
        for _ in range(3):
            answer = await asking.get(url, headers={"Range": "bytes=0-4095"})
            assert (answer.status_code, answer.content) == (200, PNG)
    assert [b"\r\nrange: bytes=0-4095\r\n" in request.lower() for request in server.requests] == [True] * 3


async def test_connection_to_one_host_is_not_used_for_another(server: BadServer) -> None:
    """Each request is judged, also where the client would go on with a connection that it has."""
    async with bad_server() as other, client(LOOPBACK) as asking:
        for one, body in ((server, b"1"), (other, b"2"), (server, b"1")):
            assert (await asking.get(one.file("/", body, "Connection: keep-alive"))).content == body


async def test_tls_goes_through_to_the_host_that_was_named(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, "pictures.example")
    trusted = ssl.create_default_context(cafile=str(certificate))

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with bad_server(certificate) as server:
        server.file("/a.png", PNG)
        reach = replace(LOOPBACK, hosts=("pictures.example",), resolve=resolve)
        async with client(reach, verify=trusted) as asking:
            answer = await asking.get(server.url("/a.png", "pictures.example", "https"))
            assert (answer.status_code, answer.content) == (200, PNG)
            with pytest.raises(httpx.ProxyError, match="403"):
                await asking.get(server.url("/a.png", "elsewhere.example", "https"))
        assert len(server.requests) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "fd00::1"])
async def test_no_private_address_is_asked_by_name(address: str, server: BadServer) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return [address]

    async with client(Reach(resolve=resolve)) as asking:
        answer = await asking.get(server.url("/a.png", "pictures.example"))
        assert (answer.status_code, "not found" in answer.text) == (403, True)
    assert server.requests == []


async def test_picture_is_none_of_a_cards_files(server: BadServer) -> None:
    url = server.file("/v1/metadata/a.png", PNG)
    async with client(Reach()) as asking:
        assert (await asking.get(url)).status_code == 403
        del asking.headers["user-agent"]  # as the frontend asks for them, and only for them
        assert (await asking.get(url)).content == PNG
    assert len(server.requests) == 1


async def test_exports_go_to_their_receiver_alone(server: BadServer) -> None:
    """Exactly this address and only by POST: no image URL reaches it, and no export anything else."""
    url = server.file("/secret/v1/logs?name=x", b"")
    made = Proxy(Reach(), [url.replace("http://127", "HTTP://127"), "https://otel.example/v1/traces"])
    named = made.variables({})
    body = bytes(200_000)
    async with made.run(), httpx.AsyncClient(proxy=named["ALL_PROXY"], timeout=60) as asking:
        assert (await asking.post(url, content=body)).status_code == 200
        assert (await asking.get(url)).status_code == 403
        assert (await asking.post(url + "y", content=body)).status_code == 403
        assert (await asking.post(server.file("/other", b""), content=body)).status_code == 403
    assert [request.split(b" ", 2)[:2] for request in server.requests] == [
        [b"POST", b"/secret/v1/logs?name=x"]
    ]
    hosts = named["NO_PROXY"].split(",")
    assert "127.0.0.1" not in hosts
    assert "otel.example" in hosts  # a tunnel for TLS would be checked as one for images


async def test_slow_pictures_keep_no_card_waiting(server: BadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_IMAGES", 2)
    slow, card = server.serve("/slow.png", silent), server.file("/v1/metadata/config.json", b"{}")
    async with client(LOOPBACK) as asking:
        waiting = [asyncio.ensure_future(asking.get(slow)) for _ in range(2)]
        await asyncio.to_thread(until, "both to be asked for", lambda: len(server.requests) == 2)
        refused = await asking.get(server.file("/a.png", PNG))
        assert (refused.status_code, "at once" in refused.text) == (403, True)
        del asking.headers["user-agent"]
        assert (await asking.get(card)).content == b"{}"
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_others_on_this_machine_may_not_use_it(server: BadServer) -> None:
    made = Proxy(LOOPBACK)
    named = httpx.URL(made.variables({})["ALL_PROXY"])
    async with made.run():
        for password in ("", "wrong"):
            url = named.copy_with(password=password)
            async with httpx.AsyncClient(proxy=str(url)) as asking:
                assert (await asking.get(server.file("/a.png", PNG))).status_code == 403
    assert server.requests == []


async def test_other_words_get_an_answer(server: BadServer) -> None:
    made = Proxy(LOOPBACK)
    port = httpx.URL(made.variables({})["ALL_PROXY"]).port
    async with made.run():
        for words in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00\r\n\r\n", b"A" * 300_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(words)
            assert b" 403 " in await asyncio.wait_for(reader.readline(), 60)
            writer.close()


async def test_hosts_that_do_not_answer_are_left(server: BadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "IDLE_SECONDS", 0.2)
    async with client(LOOPBACK) as asking:
        with pytest.raises(httpx.RemoteProtocolError):
            await asking.get(server.serve("/a.png", silent))


async def test_operators_own_proxy_and_own_hosts_stand() -> None:
    own = {
        "NO_PROXY": "a.example,b.example",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel.example:4318/v1",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "HF_ENDPOINT": "https://hub.example",
    }
    made = Proxy(LOOPBACK)
    async with made.run():
        assert made.variables({"https_proxy": "http://proxy.example:3128"}) == {}
        found = made.variables(own)["no_proxy"].split(",")
        assert found == ["a.example", "b.example", "localhost", "hub.example", "otel.example", "10.96.0.1"]
        assert "huggingface.co" in made.variables({})["no_proxy"]
