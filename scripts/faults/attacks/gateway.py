"""Scenarios of tenants behind a gateway: clients that leave, places that one fills, seats of a killed one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from faults.scenario import Run, Scenario, Seen, noted
from harness import gateway as gateways
from harness import served
from harness.gateway import Gateway
from harness.leaving_clients import Models, booked_and_used, leave, wait_until_quiet
from harness.occupied_places import CHAT, COMPLETIONS, PLACES, SPEECH
from harness.processes import survivors
from harness.several_kinds import groups
from harness.waiting import until

CLIENTS, SEATS = 400, 12
FOREVER = {"model": CHAT, "prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}


@contextlib.contextmanager
def behind_a_gateway(folder: Path, _: Path) -> Iterator[Gateway]:
    """Models for text and speech with the fake engine."""
    with gateways.gateway(folder, "--config", str(described(folder))) as made:
        yield made


def described(folder: Path) -> Path:
    """Write a serve file whose streams last."""
    (folder / "models").mkdir()
    path = groups(folder / "models", CHAT, SPEECH)
    settings = json.loads(path.read_text())
    settings["workers"][0]["fake_engine"] |= {"token_ms": 5, "context_length": 131072}
    path.write_text(json.dumps(settings))
    return path


def clients_that_leave(run: Run) -> Seen:
    site: Gateway = run.sites.get(behind_a_gateway)
    name = f"leaver-{run.number}"
    limits = ("--concurrent", str(SEATS), "--tokens-per-day", "100000000")
    secret, control = site.create_key(name, "--tenant", name, *limits), site.control.pid
    models = Models(CHAT, SPEECH)
    outcome = asyncio.run(leave(site.url, secret, CLIENTS, models=models, seed=run.number))
    assert not outcome.failures(), outcome.failures()
    with site.database() as database:
        wait_until_quiet(database)
        row = database.run_now(lambda t: t.one("SELECT id FROM gateway_keys WHERE name = ?", name))
        assert row is not None
        booked, used = asyncio.run(booked_and_used(database, str(row[0])))
    assert booked == used, f"{booked} tokens are booked, {used} were used"
    assert site.control.pid == control, "the control app was replaced"
    site.run("keys", "revoke", str(row[0]))
    with site.client(key=secret) as client:
        began = time.monotonic()
        until("the key to be refused", lambda: client.get("/v1/models").status_code == 401, 60)
        refused = time.monotonic() - began
    return Seen(
        refused,
        f"{outcome.left} of {CLIENTS} left; all seats free, {booked} tokens booked and used; "
        f"same control app; the revoked key refused after {refused:.1f} s",
    )


def second_tenant(run: Run) -> Seen:
    site: Gateway = run.sites.get(behind_a_gateway)
    slowest, where = 0.0, ""
    for place in PLACES:
        keys = [f"{who}-{place.name}-{run.number}" for who in ("fills", "uses")]
        first = site.create_key(keys[0], "--tenant", keys[0], *place.limits)
        second = site.create_key(keys[1], "--tenant", keys[1], "--requests-per-minute", "1000000")
        with (
            noted(place.name),
            site.client(key=first) as filler,
            site.client(key=second) as user,
            place.occupy(filler) as is_occupied,
        ):
            began = time.monotonic()
            place.use(user)
            seconds = time.monotonic() - began
            assert is_occupied(), "the place was not full any more"
        if seconds > slowest:
            slowest, where = seconds, place.name
    return Seen(
        slowest,
        f"answered beside {len(PLACES)} full places ({', '.join(place.name for place in PLACES)}); "
        f"slowest {slowest:.1f} s ({where})",
    )


def killed_with_seats(run: Run) -> Seen:
    """Kill all of `serve` as the kernel's OOM killer does, and start it again with its database."""
    file = described(run.folder)
    with gateways.gateway(run.folder, "--config", str(file)) as site:
        secret = site.create_key("killed", "--concurrent", "1", "--tokens-per-day", "200000")
        is_streaming = threading.Event()

        def stream() -> None:
            with (
                contextlib.suppress(httpx.HTTPError),
                site.client(key=secret) as client,
                client.stream("POST", COMPLETIONS, json=FOREVER) as reply,
            ):
                is_streaming.set()
                reply.read()

        thread = threading.Thread(target=stream)
        thread.start()
        assert is_streaming.wait(60)
        below = site.serving.below()
        site.serving.process.send_signal(signal.SIGKILL)
        thread.join(60)
        left = survivors(below, 60)
        assert left == [], f"still running: {left}"
        again = served.start(run.folder, "--gateway", "--config", str(file), env=site.env)
        try:
            again.wait_ready(200)
            seconds = until_admitted(again.url, secret)
        finally:
            again.process.kill()
    return Seen(seconds, f"the only seat of a key was free {seconds:.0f} s after the next start")


def until_admitted(url: str, secret: str) -> float:
    short = {**FOREVER, "max_tokens": 1, "stream": False}
    began = time.monotonic()
    with httpx.Client(base_url=url, headers={"x-api-key": secret}, timeout=60) as client:
        until("the seat", lambda: client.post(COMPLETIONS, json=short).status_code == 200, 180, every=1.0)
    return time.monotonic() - began


SCENARIOS = (
    Scenario(
        "tenant-leaves",
        "400 clients leave at random moments of kept, streamed and background responses, batches, uploads, "
        "transcriptions: no seat and no token is lost",
        clients_that_leave,
    ),
    Scenario(
        "tenant-beside",
        "one tenant fills each place of a gateway where requests wait: another one is answered meanwhile",
        second_tenant,
    ),
    Scenario(
        "gateway-killed-with-seats",
        "`serve --gateway` gets SIGKILL while a key's only seat is taken: free soon after the next start",
        killed_with_seats,
    ),
)
