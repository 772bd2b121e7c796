"""Scenarios of harmful clients: they do not read, hold connections, or try to turn the service off."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from faults.deployment import fake_words, pids, started, stopped, workers
from faults.others import Others, of_fake_engine
from faults.scenario import Run, Scenario, Seen, needs_hosts
from harness.hosts import hosts
from harness.misbehaving import Streams, stalled
from harness.processes import COMMAND
from harness.served import Serving
from harness.stack import Stack
from harness.waiting import until

STALLED = 8
UNREAD = "dynamo_component_answers_unread_total"
CONNECTIONS = 300
PATIENCE_SECONDS = 32
"""More than the supervisor has (`supervise/limits.py`)."""
SHORT_SECONDS = 5
DESCRIPTORS, STREAMS = 256, 300
ENDLESS = {"model": "tiny", "prompt": "hello", "max_tokens": 2000, "stream": True, "ignore_eos": True}


# --- clients that do not read ---------------------------------------------------------------------------


def stalled_readers(run: Run) -> Seen:
    words = fake_words(
        run.model, "--unread-mb", "1", "--drain-seconds", "5", context_length=1 << 20, token_ms=1
    )
    with started(run.folder, *words) as serving, contextlib.ExitStack() as held:
        (worker,) = workers(serving)
        with Others(serving.stack.url, of_fake_engine()) as others:
            for _ in range(STALLED):
                held.enter_context(stalled(serving.stack))
            until("the end of their requests", lambda: worker.metric(UNREAD) == STALLED, 240)
            others.go_on()
            assert pids(serving) == [worker.pid]
        for _ in range(2):
            held.enter_context(stalled(serving.stack))
        began = time.monotonic()
        stopped(serving, signal.SIGTERM)
        assert "killed" not in serving.output.read_text(), serving.output.read_text()[-300:]
        took = time.monotonic() - began
    waited = others.longest_seconds
    return Seen(
        waited,
        f"{STALLED} of {STALLED} ended; {others.total} other answers right, longest pause {waited:.2f} s; "
        f"SIGTERM with two more of them: over in {took:.1f} s",
    )


# --- callers of the system port -------------------------------------------------------------------------


def port_flood(run: Run) -> Seen:
    """The first run is longer than the supervisor's patience."""
    serving = run.sites.get(one_fake)
    (worker,) = workers(serving)
    before = pids(serving)
    hold_seconds = PATIENCE_SECONDS if run.number == 1 else SHORT_SECONDS
    slowest = looks = 0.0
    with Others(serving.stack.url, of_fake_engine()) as others, contextlib.ExitStack() as held:
        for number in range(CONNECTIONS):
            idle = held.enter_context(socket.create_connection(("127.0.0.1", worker.system_port), 60))
            if number % 2:  # with half a request, the rest says nothing at all
                with contextlib.suppress(OSError):
                    idle.sendall(b"GET /live HTTP/1.1\r\nhost: ")
        began = time.monotonic()
        while time.monotonic() - began < hold_seconds:
            asked = time.monotonic()
            status = httpx.get(f"{worker.system_url}/live", timeout=60).status_code
            assert status == 200, f"/live answers {status}"
            slowest, looks = max(slowest, time.monotonic() - asked), looks + 1
        others.go_on()
    assert pids(serving) == before, "the worker was replaced"
    assert worker.health() == 200
    return Seen(
        slowest,
        f"/live answered {looks:.0f} of {looks:.0f} times in {hold_seconds} s, slowest {slowest:.2f} s; "
        f"{others.total} answers right; same worker",
    )


@contextlib.contextmanager
def one_fake(folder: Path, model: Path) -> Iterator[Serving]:
    with started(folder, *fake_words(model)) as serving:
        yield serving


# --- a switch for everybody -----------------------------------------------------------------------------


def busy_threshold(run: Run) -> Seen:
    """The caller is on another machine than the deployment."""
    serving = run.sites.get(on_a_host)
    stack: Stack = serving.stack
    before = pids(serving)
    assert len(before) == 2, f"workers {before}"
    closing = {"model": "tiny", "active_decode_blocks_threshold": 0.0, "active_prefill_tokens_threshold": 0}
    with Others(stack.url, of_fake_engine()) as others:
        statuses = {stack.post("/busy_threshold", closing).status_code for _ in range(20)}
        statuses.add(stack.get("/busy_threshold").status_code)
        others.go_on()
    assert statuses == {404}, f"it answers {statuses}"
    assert pids(serving) == before
    waited = others.longest_seconds
    return Seen(waited, f"404 each of 21 times; {others.total} answers right, longest pause {waited:.2f} s")


@contextlib.contextmanager
def on_a_host(folder: Path, model: Path) -> Iterator[Serving]:
    """A deployment on a machine of its own, with more than one worker; this process is on another one."""
    with hosts("a") as places:
        host = places["a"]
        command = (*host.prefix, *COMMAND)
        words = fake_words(model, "--host", "0.0.0.0", "--prefill", "1", "--decode", "1")
        with started(folder, *words, command=command) as serving:
            serving.stack.address = host.address
            yield serving


# --- more streams than descriptors ----------------------------------------------------------------------


def few_descriptors(run: Run) -> Seen:
    serving = run.sites.get(with_few_descriptors)
    (worker,) = workers(serving)
    at_once, share, statuses = asyncio.run(_crowd(serving))
    assert set(statuses) <= {200, 529} and statuses.total() == STREAMS, f"statuses {dict(statuses)}"
    assert share < 0.7, f"a process takes {share:.2f} of a core"
    with Others(serving.stack.url, of_fake_engine()) as others:
        others.go_on()
    assert pids(serving) == [worker.pid], "the worker was replaced"
    return Seen(
        share,
        f"{at_once[200]} streamed at once, {at_once[529]} refused (529), {STREAMS - at_once.total()} waited "
        f"for others to leave, then answered; {share:.2f} of a core; right answers afterwards; same worker",
    )


@contextlib.contextmanager
def with_few_descriptors(folder: Path, model: Path) -> Iterator[Serving]:
    """As the shell's `ulimit -n` does it, for all of its processes."""
    limited = ("/bin/sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh", *COMMAND)
    with started(folder, *fake_words(model, token_ms=200), command=limited) as serving:
        yield serving


async def _crowd(serving: Serving) -> tuple[Counter[int], float, Counter[int]]:
    """Who was answered while all were there, what part of a core a process took, who was answered in the end.

    The frontend takes two descriptors for each stream, so that most clients wait to be heard by it.
    """
    _raise_own_limit()
    (worker,) = workers(serving)
    streams = Streams(serving.stack.url)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=httpx.Timeout(180), limits=limits) as client,
        asyncio.timeout(240),
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(STREAMS):
            tasks.create_task(streams.one(client, ENDLESS))
        await streams.seen(DESCRIPTORS // 4)
        before, began, read = _processor_seconds(serving), time.monotonic(), streams.lines
        while time.monotonic() - began < SHORT_SECONDS:  # long enough to tell a loop that spins
            live = await asyncio.to_thread(httpx.get, f"{worker.system_url}/live", timeout=60)
            assert live.status_code == 200, f"/live answers {live.status_code}"
        passed, after = time.monotonic() - began, _processor_seconds(serving)
        assert streams.lines > read, "no stream goes on"
        at_once = streams.statuses.copy()
        streams.leave()
    return at_once, max((after[pid] - used) / passed for pid, used in before.items()), streams.statuses


def _processor_seconds(serving: Serving) -> dict[int, float]:
    found = {}
    for process in [psutil.Process(serving.process.pid), *serving.below()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def _raise_own_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


SCENARIOS = (
    Scenario(
        "stalled",
        f"{STALLED} clients ask for endless answers and stop reading: they end, others go on, SIGTERM drains",
        stalled_readers,
    ),
    Scenario(
        "flood",
        f"{CONNECTIONS} idle connections to the system port, half with half a request: probes are answered",
        port_flood,
    ),
    Scenario(
        "busy",
        "another machine sets the frontend's busy threshold to nothing: closed, service stays open",
        busy_threshold,
        needs_hosts,
    ),
    Scenario(
        "descriptors",
        f"{STREAMS} streams at a `serve` with {DESCRIPTORS} descriptors: honest errors, no spin, recovers",
        few_descriptors,
    ),
)
