"""Frontend and workers on machines of their own: addresses, links that are cut, hosts that are lost."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.hosts import Host, Hosts, hosts, refusal
from harness.servers import etcd
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from runtime.conftest import fake

pytestmark = [
    pytest.mark.more,
    pytest.mark.timeout(300),
    pytest.mark.skipif(refusal() is not None, reason=str(refusal())),
]
CUT_SECONDS = 10.0
BACK_SECONDS = 10.0
TOKENS = 120
TOKEN_MS = 20
PROMPTS = [[number, 5, 6] for number in range(20, 32)]
REQUESTS = "dynamo_component_requests_total"
IN_FLIGHT = "dynamo_component_requests_in_flight"
NIXL = ("--connector", "nixl", "--disaggregation-mode")
Cut = Callable[[Host], None]


@dataclass
class Load:
    """Requests that go on arriving, each checked against the answer of a quiet hour."""

    made: Stack
    expected: dict[int, str]
    pool: ThreadPoolExecutor
    answers: list[Future[int]] = field(default_factory=list)

    def send_until(self, done: Callable[[], bool], seconds: float) -> None:
        """A request every so often until that; fails after so many seconds."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"still not so after {seconds} s of requests"
            self.answers.append(self.pool.submit(self.ask, random.randrange(len(PROMPTS))))
            time.sleep(0.5)

    def send_all(self) -> None:
        """Every prompt at once, so that every worker has some."""
        for number in range(len(PROMPTS)):
            self.answers.append(self.pool.submit(self.ask, number))

    def send_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.send_until(lambda: time.monotonic() > end, seconds + 30)

    def ask(self, number: int) -> int:
        """The status of one; a wrong, shortened or doubled text fails the test."""
        reply = complete(self.made, PROMPTS[number])
        if reply.status_code == 200:
            assert text_of(reply) == self.expected[number]
        else:
            assert reply.status_code >= 500 and reply.json()["message"], reply.text
        return reply.status_code

    def statuses(self) -> list[int]:
        """Of all that were sent; none may wait for ever."""
        return [answer.result(60) for answer in self.answers]


def complete(made: Stack, prompt: list[int]) -> httpx.Response:
    return made.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS})


def text_of(reply: httpx.Response) -> str:
    body = reply.json()
    assert body["usage"]["completion_tokens"] == TOKENS
    text: str = body["choices"][0]["text"]
    return text


@dataclass
class Site:
    """A deployment over several hosts."""

    places: Hosts
    stack: Stack
    model: Path
    at: dict[str, Worker] = field(default_factory=dict)

    def start_worker(self, place: str, *flags: str, **spec: Any) -> Worker:
        words = fake(self.model, **{"token_ms": TOKEN_MS, **spec})
        worker = self.stack.start_worker(*words, *flags, host=self.places[place])
        self.at[place] = worker
        return worker

    def load(self, pool: ThreadPoolExecutor) -> Load:
        """Runs once every answer is known."""
        replies = pool.map(lambda prompt: text_of(complete(self.stack, prompt)), PROMPTS)
        return Load(self.stack, dict(enumerate(replies)), pool)

    def is_busy(self, *places: str) -> bool:
        return all(self.at[place].metric(IN_FLIGHT) > 0 for place in places)

    def occupy(self, load: Load, *places: str) -> None:
        """Returns with requests running at all of these."""
        for _ in range(10):
            load.send_all()
            end = time.monotonic() + TOKENS * TOKEN_MS / 1000
            while time.monotonic() < end:
                if self.is_busy(*places):
                    return
        raise AssertionError(f"requests do not reach all of {places}")

    def instances(self) -> set[str]:
        """Addresses of the workers the frontend knows."""
        return {i["transport"]["tcp"].partition(":")[0] for i in self.stack.instances()}

    def addresses(self, *places: str) -> set[str]:
        return {self.places[place].address for place in places}


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., Site]]:
    """A frontend on host a, and as many others as are named; with `store` etcd runs on that host."""
    with ExitStack() as kept:

        def begin(*names: str, store: str | None = None) -> Site:
            places = kept.enter_context(hosts("a", *names))
            env = {}
            if store is not None:
                on = places[store]
                server = kept.enter_context(etcd(tmp_path, host=on.address, prefix=on.prefix))
                env = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": server.url}
            made = kept.enter_context(stack(tmp_path, **env))
            made.start_frontend("--host", "0.0.0.0", host=places["a"])
            return Site(places, made, model)

        yield begin


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(200) as made:
        yield made


def test_worker_that_is_told_nothing_is_reached_at_its_own_address(
    start: Callable[..., Site], tmp_path: Path
) -> None:
    site = start("b", "c")
    site.start_worker("b", *NIXL, "prefill", token_ms=0)
    site.start_worker("c", *NIXL, "decode", "--card-port", "9091", token_ms=0)
    site.stack.wait_ready(60)
    assert site.instances() == site.addresses("b", "c")
    entries = [entry for entry in (tmp_path / "discovery").rglob("*") if entry.is_file()]
    found = "\n".join(entry.read_text() for entry in entries)
    assert '"endpoint":"tcp://' in found, "an event channel is advertised too"
    assert f"http://{site.places['c'].address}:9091/v1/metadata" in found
    assert "127.0.0.1" not in found and "0.0.0.0" not in found
    site.stack.wait_over_two()


def test_own_address_is_that_of_the_default_route() -> None:
    with hosts("a", "b") as places:
        host = places["a"]
        assert own_address_on(host) == host.address, "the first network, where no route leads out"
        host.ip("link", "add", "eth1", "type", "veth", "peer", "name", "eth2")
        for device in ("eth1", "eth2"):
            host.ip("link", "set", device, "up")
        host.ip("address", "add", "10.78.0.1/24", "dev", "eth1")
        host.ip("route", "add", "default", "via", "10.78.0.2")
        assert own_address_on(host) == "10.78.0.1"
        for device in ("eth0", "eth1"):
            host.ip("link", "set", device, "down")
        assert own_address_on(host) == "127.0.0.1", "without any network"


def own_address_on(host: Host) -> str:
    code = "from dynamo_vllm.serving.plane.address import own_address; print(own_address())"
    command = [*host.prefix, sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_cut_link_and_lost_host_lose_no_answer(start: Callable[..., Site], pool: ThreadPoolExecutor) -> None:
    """Both at once, for the time it takes: b falls silent for ten seconds, d is gone for good."""
    site = start("b", "c", "d")
    for place in "bcd":
        site.start_worker(place)
    site.stack.wait_ready(60)
    load = site.load(pool)
    site.occupy(load, "b", "c", "d")
    site.places["b"].go_silent()
    site.places["d"].lose()
    load.send_for(CUT_SECONDS)
    site.places["b"].restore()
    assert_back_in_service(site, load, "b")
    load.send_until(lambda: site.instances() == site.addresses("b", "c"), 60)
    statuses = load.statuses()
    assert statuses.count(200) > 0.9 * len(statuses), "the others take over"
    assert set(pool.map(load.ask, range(len(PROMPTS)))) == {200}


def assert_back_in_service(site: Site, load: Load, place: str) -> None:
    """Whoever was cut off answers again, without anything done by hand."""
    until("its figures", lambda: site.at[place].health() == 200)
    before = site.at[place].metric(REQUESTS)
    load.send_until(lambda: site.at[place].metric(REQUESTS) > before, 60)


@pytest.fixture
def two(start: Callable[..., Site]) -> Callable[..., Site]:
    """Two workers on hosts of their own, ready; with `store` etcd runs on that host."""

    def begin(*more: str, store: str | None = None) -> Site:
        site = start("b", "c", *more, store=store)
        for place in "bc":
            site.start_worker(place)
        site.stack.wait_ready(60)
        return site

    return begin


@pytest.mark.long
@pytest.mark.parametrize("store", [None, "a"])
@pytest.mark.parametrize("cut", [Host.pull_cable, Host.go_silent])
def test_link_cut_for_ten_seconds(
    two: Callable[..., Site], pool: ThreadPoolExecutor, cut: Cut, store: str | None
) -> None:
    site = two(store=store)
    load = site.load(pool)
    site.occupy(load, "b", "c")
    cut(site.places["b"])
    load.send_for(CUT_SECONDS)
    site.places["b"].restore()
    assert_back_in_service(site, load, "b")
    statuses = load.statuses()
    assert statuses.count(200) > 0.9 * len(statuses)
    assert site.at["b"].process.poll() is None, "the worker was not restarted"


@pytest.mark.long
@pytest.mark.parametrize("is_lost", [False, True])
def test_silent_for_longer_than_the_lease(
    two: Callable[..., Site], pool: ThreadPoolExecutor, is_lost: bool
) -> None:
    """etcd forgets the worker; one that goes on running comes back under its old number."""
    site = two("e", store="e")
    load = site.load(pool)
    site.occupy(load, "b", "c")
    site.places["b"].lose() if is_lost else site.places["b"].go_silent()
    load.send_until(lambda: site.instances() == site.addresses("c"), 60)
    if not is_lost:
        site.places["b"].restore()
        assert_back_in_service(site, load, "b")
        assert site.at["b"].process.poll() is None, "the worker was not restarted"
    assert set(load.statuses()) == {200}


@pytest.mark.long
@pytest.mark.parametrize("place", ["b", "c"])
@pytest.mark.parametrize("cut", [Host.pull_cable, Host.go_silent])
def test_only_prefill_or_decode_host_cut_off(
    start: Callable[..., Site], pool: ThreadPoolExecutor, cut: Cut, place: str
) -> None:
    """There is nobody to take over: errors say so at once or within seconds, and end with the cut."""
    site = start("b", "c")
    site.start_worker("b", *NIXL, "prefill")
    site.start_worker("c", *NIXL, "decode")
    site.stack.wait_ready(60)
    load = site.load(pool)
    load.send_for(2)
    cut(site.places[place])
    load.send_for(CUT_SECONDS)
    site.places[place].restore()
    until("an answer", lambda: load.ask(0) == 200)
    statuses = load.statuses()
    assert {200} < set(statuses)


@pytest.mark.long
def test_lost_prefill_host_is_done_without(start: Callable[..., Site], pool: ThreadPoolExecutor) -> None:
    site = start("b", "c")
    site.start_worker("b", *NIXL, "prefill", prefill_ms=500)
    site.start_worker("c", *NIXL, "decode")
    site.stack.wait_ready(60)
    load = site.load(pool)
    load.send_for(2)
    site.places["b"].lose()
    load.send_until(lambda: site.instances() == site.addresses("c"), 60)
    load.statuses()
    assert set(pool.map(load.ask, range(len(PROMPTS)))) == {200}


@pytest.mark.long
@pytest.mark.parametrize("cut", [Host.pull_cable, Host.go_silent])
def test_host_of_etcd_cut_off(two: Callable[..., Site], pool: ThreadPoolExecutor, cut: Cut) -> None:
    """Requests need no discovery once everybody knows each other."""
    site = two("e", store="e")
    load = site.load(pool)
    cut(site.places["e"])
    load.send_for(CUT_SECONDS)
    site.places["e"].restore()
    load.send_for(BACK_SECONDS)
    assert set(load.statuses()) == {200}
    site.start_worker("c")
    site.stack.wait_ready(60)


@pytest.mark.long
def test_lost_frontend_is_replaced_on_another_host(
    start: Callable[..., Site], pool: ThreadPoolExecutor
) -> None:
    site = start("b", "c")
    site.start_worker("b")
    site.stack.wait_ready(60)
    load = site.load(pool)
    cut_off = [pool.submit(complete, site.stack, PROMPTS[0]) for _ in range(4)]
    until("requests", lambda: site.is_busy("b"))
    site.places["a"].lose()
    site.stack.start_frontend("--host", "0.0.0.0", host=site.places["c"])
    until("a new frontend", lambda: site.stack.get("/health").status_code == 200)
    assert load.ask(1) == 200
    until("an end of what nobody hears", lambda: not site.is_busy("b"))
    for waiting in cut_off:
        with pytest.raises(httpx.TransportError):
            waiting.result(90)
