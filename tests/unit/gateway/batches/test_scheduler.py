"""Turns between tenants: nobody holds a slot or a place that it cannot use while another waits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from dynamo_vllm.gateway.batches import parts, runner, scheduler
from dynamo_vllm.gateway.batches.runner import Tools
from dynamo_vllm.gateway.batches.scheduler import Scheduler
from dynamo_vllm.gateway.batches.store import Batch
from dynamo_vllm.gateway.database import DatabaseAway
from dynamo_vllm.gateway.deferred import NotYet
from harness.batch_bench import ANSWER, Bench, Handler
from harness.open_gate import OpenGate

MANY_BATCHES = """
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)
    INSERT INTO gateway_batches (id, tenant, key_id, endpoint, file_id, completion_window, status, created,
        expires, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, beat)
    SELECT 'batch_' || i, tenant, key_id, endpoint, file_id, completion_window, status, created, expires,
        0, 0, 0, 0, 0, 0, 0, 0 FROM gateway_batches, n WHERE id = ?
"""


class LimitedGate(OpenGate):
    """Lets no line of some tenants pass; a key has its tenant's name here."""

    def __init__(self, *limited: str) -> None:
        self.limited = set(limited)
        self.questions: Counter[str] = Counter()
        self.open: Counter[str] = Counter()

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        self.questions[key_id] += 1
        if key_id in self.limited:
            raise NotYet(1e9)
        self.open[key_id] += 1
        return await super().admit(request_id, key_id, path, body)


class Frontend:
    """Answers lines of some tenants when it is told to, of others at once."""

    def __init__(self, *held: str) -> None:
        self.held = set(held)
        self.go = asyncio.Event()
        self.open: Counter[str] = Counter()
        self.answered: list[str] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        tenant = request.headers["x-dynamo-meta-gateway"].split()[1]
        self.open[tenant] += 1
        if tenant in self.held:
            await self.go.wait()
        self.open[tenant] -= 1
        self.answered.append(tenant)
        return httpx.Response(200, json=ANSWER)


def tools_of(bench: Bench, frontend: Handler, gate: OpenGate, slots: int = 4) -> Tools:
    tools = replace(bench.tools(concurrency=slots), gate=gate, beat_seconds=0.05)
    transport = httpx.MockTransport(frontend)
    return replace(tools, frontend=httpx.AsyncClient(transport=transport, base_url="http://f"))


@contextlib.asynccontextmanager
async def scheduling(tools: Tools) -> AsyncIterator[Scheduler]:
    """Every slot and place is given back at the end, whatever happened."""
    running = Scheduler(tools)
    running.start()
    try:
        yield running
    finally:
        await running.close()
    assert (tools.line_slots.total, tools.line_slots.waiting, tools.file_slots.total) == (0, 0, 0)


async def test_batch_at_its_limits_asks_for_one_line_at_a_time_and_keeps_no_slot(bench: Bench) -> None:
    gate = LimitedGate("a")
    batch = bench.begin(20, "a")
    tools = tools_of(bench, Frontend(), gate, slots=8)
    async with scheduling(tools) as running:
        await bench.until("the first question", lambda: gate.questions["a"] > 0)
        bench.run(lambda t: None)
        await bench.until("its slot", lambda: tools.line_slots.total == 0)
        assert gate.questions["a"] == 1
        bench.run(lambda t: bench.store.cancel(t, batch.id, "a"))
        running.stop(batch.id)
        await bench.until_ended(batch)
    assert bench.state(batch).status == "cancelled"


async def test_limits_that_allow_lines_again_are_noticed(bench: Bench) -> None:
    class MinuteGate(LimitedGate):
        async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
            self.questions[key_id] += 1
            if self.questions[key_id] % 3:
                raise NotYet(0.0001)
            return await OpenGate.admit(self, request_id, key_id, path, body)

    batch = bench.begin(12, "a")
    async with scheduling(tools_of(bench, Frontend(), MinuteGate())):
        await bench.until_ended(batch)
    assert bench.ended(batch)[1] == [f"c{n}" for n in range(12)]


async def test_line_that_waits_for_a_better_time_holds_no_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FIRST_WAIT_SECONDS", 1e9)
    monkeypatch.setattr(runner, "LONGEST_WAIT_SECONDS", 1e9)
    tries: Counter[str] = Counter()

    def frontend(request: httpx.Request) -> httpx.Response:
        tenant = request.headers["x-dynamo-meta-gateway"].split()[1]
        tries[tenant] += 1
        return httpx.Response(503 if tenant == "a" else 200, json=ANSWER)

    bench.begin(20, "a")
    async with scheduling(tools_of(bench, frontend, OpenGate(), slots=2)) as running:
        await bench.until("the lines of a", lambda: tries["a"] == 2)
        small = bench.begin(5, "b")
        running.nudge()
        await bench.until_ended(small)
    assert tries == {"a": 2, "b": 5}  # no more lines of a batch have begun than it may have unanswered


async def test_many_batches_of_one_tenant_hide_no_other(bench: Bench) -> None:
    gate = LimitedGate("a")
    first = bench.begin(1, "a")
    bench.run(lambda t: t.execute(MANY_BATCHES, first.id))
    bench.now += 1
    small = bench.begin(1, "b")
    async with scheduling(tools_of(bench, Frontend(), gate)):
        await bench.until_ended(small)
        rows = bench.run(lambda t: t.all("SELECT tenant FROM gateway_batches WHERE owner IS NOT NULL"))
        assert len(rows) <= scheduler.BATCHES_PER_TENANT


async def test_limited_batch_makes_room_for_a_tenant_without_a_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MOST_BATCHES", 2)
    monkeypatch.setattr(scheduler, "LIMITED_SECONDS", 0.0)
    monkeypatch.setattr(runner, "LONGEST_WAIT_SECONDS", 0.01)
    gate = LimitedGate("a", "b")
    limited = [bench.begin(3, "a"), bench.begin(3, "b")]
    async with scheduling(tools_of(bench, Frontend(), gate)) as running:
        await bench.until("both to wait", lambda: len(gate.questions) == 2)
        bench.now += 1
        small = bench.begin(2, "c")
        running.nudge()
        await bench.until_ended(small)
        gate.limited.clear()
        await bench.until("the parked one", lambda: any(bench.state(one).ended for one in limited))


async def test_running_batch_makes_room_after_its_turn_and_loses_no_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MOST_BATCHES", 1)
    monkeypatch.setattr(scheduler, "TURN_SECONDS", 0.0)
    requests: Counter[str] = Counter()
    frontend = Frontend("a")

    async def counted(request: httpx.Request) -> httpx.Response:
        requests[request.headers["x-dynamo-meta-gateway"]] += 1
        return await frontend(request)

    large = bench.begin(30, "a")
    tools = tools_of(bench, counted, OpenGate(), slots=2)
    async with scheduling(tools) as running:
        await bench.until("lines of a", lambda: frontend.open["a"] == 2)
        small = bench.begin(2, "b")
        running.nudge()
        runs = running._running
        await bench.until("the batch to be parked", lambda: any(one.run.is_parked for one in runs.values()))
        monkeypatch.setattr(scheduler, "TURN_SECONDS", 1e9)
        frontend.go.set()
        await bench.until_ended(small)
        assert bench.state(large).completed < 30
        await bench.until_ended(large)
    assert bench.ended(large)[1] == [f"c{n}" for n in range(30)]
    assert set(requests.values()) == {1}


async def test_cancelled_and_expired_batches_end_while_all_places_are_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MOST_BATCHES", 1)
    gate = LimitedGate("a")
    running_batch = bench.begin(2, "a")
    async with scheduling(tools_of(bench, Frontend(), gate)) as running:
        await bench.until("a to run", lambda: gate.questions["a"] > 0)
        cancelled = bench.begin(2, "a")
        expired = bench.begin_with(bench.files.path(cancelled.file_id).read_bytes(), "a", seconds=-1)
        bench.run(lambda t: bench.store.cancel(t, cancelled.id, "a"))
        running.nudge()
        await bench.until_ended(cancelled, expired)
        assert bench.state(running_batch).ended is None
    states = [bench.state(one).status for one in (cancelled, expired)]
    assert states == ["cancelled", "expired"]


async def test_gateway_that_stops_leaves_its_batches_to_the_next(bench: Bench) -> None:
    gate = LimitedGate("a")
    batches = [bench.begin(3, "a"), bench.begin(3, "a")]
    async with scheduling(tools_of(bench, Frontend(), gate)):
        await bench.until("questions", lambda: gate.questions["a"] == 2)
    owners = bench.run(lambda t: t.all("SELECT owner FROM gateway_batches"))
    assert owners == [(None,), (None,)]
    async with scheduling(tools_of(bench, Frontend(), OpenGate())):
        await bench.until_ended(*batches)
    assert json.loads(bench.files.path(bench.state(batches[0]).output_file or "").read_text().splitlines()[0])


async def fail_but_once(bench: Bench, batch: Batch) -> Tools:
    """Restart until one more failure of the batch would end it."""
    tools = tools_of(bench, Frontend(), OpenGate())
    for count in range(1, scheduler.MOST_FAILURES):
        async with scheduling(tools):
            await bench.until(f"failure {count}", lambda count=count: bench.failures(batch) == count)  # type: ignore[misc]
        assert bench.state(batch).ended is None
        bench.now += 100
    return tools


async def test_batch_that_cannot_be_run_fails_after_some_runs_also_across_restarts(bench: Bench) -> None:
    batch = bench.begin(2, "a")
    file = bench.files.path(batch.file_id)
    file.unlink()
    file.mkdir()  # so that it is there, and nobody can read it
    tools = await fail_but_once(bench, batch)
    async with scheduling(tools):
        await bench.until_ended(batch)
    state = bench.state(batch).shown()
    assert (state["status"], state["failed_at"] is not None) == ("failed", True)
    assert "IsADirectoryError" in state["errors"]["data"][0]["message"]
    assert bench.failures(batch) == 0


async def test_batch_whose_output_cannot_be_written_fails_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> tuple[int, int]:
        raise KeyError("a defect")

    monkeypatch.setattr(parts, "put_together", broken)
    batch = bench.begin(2, "a")
    tools = await fail_but_once(bench, batch)
    async with scheduling(tools):
        await bench.until_ended(batch)
        await bench.until("its parts to go", lambda: not (bench.folder / "parts" / batch.id).exists())
    state = bench.state(batch)
    assert (state.status, state.output_file, state.completed) == ("failed", None, 2)


async def test_full_disk_fails_no_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = "cannot go on now"
    outages = [OSError(errno.ENOSPC, "no room"), sqlite3.OperationalError("full"), DatabaseAway("away")]

    def full(*_: object) -> tuple[int, int]:
        raise outages[count % 3]

    batch = bench.begin(2, "a")
    with monkeypatch.context() as patched:
        patched.setattr(parts, "put_together", full)
        for count in range(1, 3 + scheduler.MOST_FAILURES):
            async with scheduling(tools_of(bench, Frontend(), OpenGate())):
                await bench.until("an outage", lambda count=count: caplog.text.count(words) == count)  # type: ignore[misc]
            bench.now += 100
    assert (bench.failures(batch), bench.state(batch).ended) == (0, None)
    assert {path.name for path in (bench.folder / "files").iterdir()} == {batch.file_id}
    async with scheduling(tools_of(bench, Frontend(), OpenGate())):
        await bench.until_ended(batch)
    assert bench.ended(batch)[1] == ["c0", "c1"]


async def test_expired_batch_says_why_even_without_its_file(bench: Bench) -> None:
    content = bench.files.path(bench.begin(2, "a").file_id).read_bytes()
    batches = [bench.begin_with(content, tenant, seconds=-1) for tenant in ("b", "c")]
    bench.files.path(batches[1].file_id).unlink()
    async with scheduling(tools_of(bench, Frontend(), LimitedGate("a"))):
        await bench.until_ended(*batches)
    states = [bench.state(batch).shown() for batch in batches]
    assert [state["status"] for state in states] == ["expired", "expired"]
    assert [state["errors"]["data"][0]["code"] for state in states] == ["batch_expired", "batch_expired"]


async def test_expired_batch_that_was_never_checked_writes_no_line(bench: Bench) -> None:
    batch = bench.begin_with(b"x\n" * 100_000, "a", seconds=-1)
    async with scheduling(tools_of(bench, Frontend(), OpenGate())):
        await bench.until_ended(batch)
    assert (bench.state(batch).status, bench.state(batch).error_file) == ("expired", None)


async def test_many_cancelled_batches_of_a_tenant_keep_no_other_from_its_end(bench: Bench) -> None:
    many, other = [bench.begin(1, "a") for _ in range(200)], bench.begin(1, "b")
    bench.run(lambda t: t.execute("UPDATE gateway_batches SET status = 'cancelling'"))
    bench.run(lambda t: t.execute("UPDATE gateway_batches SET beat = -100 WHERE tenant = 'b'"))
    bench.run(lambda t: t.execute("UPDATE gateway_batches SET beat = -200 WHERE tenant = 'a'"))  # never ran
    async with scheduling(tools_of(bench, Frontend(), OpenGate())):
        await bench.until_ended(other)
        assert sum(bench.state(batch).ended is None for batch in many) > 150
