"""What one tenant does to others: it fills each place, leaves at random moments, dies with its seats."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from dynamo_vllm.gateway.store import keys
from harness import gateway as gateways
from harness import served
from harness.gateway import Gateway
from harness.leaving_clients import Models, booked_and_used, leave, taken_seats, wait_until_quiet
from harness.occupied_places import PLACES, Place
from harness.processes import survivors
from harness.several_kinds import groups
from harness.waiting import until

MODELS = Models(chat="chat", speech="hears")
CLIENTS = int(os.environ.get("DYNAMO_VLLM_CLIENTS", "400"))
SEATS = 12
LIMITS = ("--concurrent", str(SEATS), "--tokens-per-day", "100000000", "--requests-per-minute", "1000000")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of models for text, whose streams last, and speech."""
    path = groups(tmp_path_factory.mktemp("models"), "chat", "hears")
    described = json.loads(path.read_text())
    described["workers"][0]["fake_engine"] |= {"token_ms": 5, "context_length": 131072}
    path.write_text(json.dumps(described))
    return path


@pytest.fixture(scope="module")
def running(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateways.gateway(tmp_path_factory.mktemp("gateway"), "--config", str(file)) as made:
        yield made


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_tenant_that_fills_a_place_keeps_no_other_out(running: Gateway, place: Place) -> None:
    limited = ("--requests-per-minute", "1000000")
    first = running.create_key(f"fills-{place.name}", "--tenant", "filler", *place.limits)
    second = running.create_key(f"uses-{place.name}", "--tenant", "user", *limited)
    with (
        running.client(key=first) as filler,
        running.client(key=second) as user,
        place.occupy(filler) as is_occupied,
    ):
        place.use(user)
        assert is_occupied()


@pytest.mark.timeout(900)
def test_clients_that_leave_at_any_moment_leave_nothing_behind(running: Gateway) -> None:
    secret = running.create_key("leaver", *LIMITS)
    control = running.control.pid
    outcome = asyncio.run(
        leave(running.url, secret, int(os.environ.get("DYNAMO_VLLM_CLIENTS", "400")), models=MODELS)
    )
    print(dict(outcome.ends))
    assert outcome.failures() == {} and outcome.left > 100
    with running.database() as database:
        wait_until_quiet(database)
        key_id = key_of(running, "leaver")
        booked, used = asyncio.run(booked_and_used(database, key_id))
        assert booked == used > 0
        assert taken_seats(database) == {}
    assert running.control.pid == control
    assert together(running, secret, SEATS + 4) == {200: SEATS}
    running.run("keys", "revoke", key_id)
    with running.client(key=secret) as client:
        until("the key to be refused", lambda: client.get("/v1/models").status_code == 401, 30)


def together(running: Gateway, secret: str, count: int) -> dict[int, int]:
    """Open streams that stay open: the statuses of those that began, beside 429."""
    body = {"model": "chat", "prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    with ExitStack() as ends:
        client = ends.enter_context(running.client(key=secret, limits=httpx.Limits(max_connections=None)))
        replies = [
            ends.enter_context(client.stream("POST", "/v1/completions", json=body)) for _ in range(count)
        ]
        statuses = [reply.status_code for reply in replies]
    return {status: statuses.count(status) for status in set(statuses) - {429}}


def key_of(running: Gateway, name: str) -> str:
    with running.database() as database:
        (key,) = [key for key in database.run_now(keys.find_all()) if key.name == name]
    return key.id


@pytest.mark.more
@pytest.mark.timeout(900)
def test_seats_of_a_killed_deployment_come_back(running: Gateway, file: Path) -> None:
    """The last test of this file: the deployment is killed as from the kernel's OOM killer."""
    secret = running.create_key("killed", "--concurrent", "1")
    body = {"model": "chat", "prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    streaming = threading.Event()

    def stream() -> None:
        with (
            running.client(key=secret) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            assert reply.status_code == 200
            streaming.set()
            try:
                reply.read()
            except httpx.HTTPError:
                return

    thread = threading.Thread(target=stream)
    thread.start()
    assert streaming.wait(60)
    below = running.serving.below()
    running.serving.process.send_signal(signal.SIGKILL)
    thread.join(60)
    assert survivors(below, 60) == []
    again = served.start(running.folder, "--gateway", "--config", str(file), env=running.env)
    try:
        again.wait_ready(200)
        with httpx.Client(base_url=again.url, headers={"x-api-key": secret}, timeout=60) as later:
            short = {**body, "max_tokens": 1, "stream": False}
            until(
                "the seat to come back",
                lambda: later.post("/v1/completions", json=short).status_code == 200,
                120,
                every=1.0,
            )
    finally:
        again.process.kill()
