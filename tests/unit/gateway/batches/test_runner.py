"""A batch in one process: a busy frontend, gateways that lose the batch, answers that the disk lost."""

from __future__ import annotations

import asyncio
import functools
import json
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.batches import answers, parts, runner
from dynamo_vllm.gateway.batches.lines import Fault
from dynamo_vllm.gateway.batches.routes import allowed
from dynamo_vllm.gateway.batches.runner import NotOurs, Run, Tools
from dynamo_vllm.gateway.batches.store import Answer, Batch
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.tenant_slots import TenantSlots
from harness.batch_bench import ANSWER, Bench, answer
from harness.open_gate import OpenGate


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FIRST_WAIT_SECONDS", 0.0001)
    monkeypatch.setattr(runner, "REFUSED_SECONDS", 0.01)


async def run(bench: Bench, tools: Tools, batch: Batch) -> tuple[Batch, list[str], list[int]]:
    """The batch after its run, the ids in its output, and the statuses in its errors."""
    await Run(tools, bench.claim(batch, "one"), "one").run()
    return bench.ended(batch)


def ids(*numbers: int) -> list[str]:
    return [f"c{number}" for number in numbers]


async def test_busy_frontend_is_asked_again_with_the_same_id(bench: Bench) -> None:
    asked: Counter[str] = Counter()
    headers: dict[str, str] = {}

    def frontend(request: httpx.Request) -> httpx.Response:
        headers.update(request.headers)
        name = request.headers["x-dynamo-meta-gateway"]
        asked[name] += 1
        if asked[name] == 3:
            return answer(request)
        if asked[name] == 2:
            raise httpx.ReadError("gone", request=request)
        return httpx.Response((429, 503, 529)[len(asked) % 3])

    batch = bench.begin(6)
    found, good, bad = await run(bench, bench.tools(frontend), batch)
    assert (found.status, good, bad) == ("completed", ids(*range(6)), [])
    assert asked == {f"{batch.id}-{n} a ledger": 3 for n in range(1, 7)}
    assert (found.input_tokens, found.output_tokens) == (18, 12)
    assert headers["x-dynamo-request-priority"] == "-5"


class SaltedGate(OpenGate):
    """Gives each key the cache salt of its tenant, as the gateway's does."""

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        headers = await super().admit(request_id, key_id, path, body)
        return {**headers, identity.CACHE_SALT: f"tenant-of-{key_id}"}


async def test_cache_salt_is_that_of_the_key_whatever_the_row_and_the_line_say(bench: Bench) -> None:
    salts: dict[str, str] = {}

    def frontend(request: httpx.Request) -> httpx.Response:
        name = request.headers[identity.METERED].split()[1]
        salts[name] = request.headers[identity.CACHE_SALT]
        return answer(request)

    tools = replace(bench.tools(frontend), gate=SaltedGate())
    for tenant in ("a", "b"):
        odd = {"cache_salt": "tenant-of-a", "nvext": {"cache_salt": "tenant-of-a"}}
        batch = bench.begin(1, tenant, **odd)
        bench.run(lambda t: t.execute("UPDATE gateway_batches SET cache_salt = 'tenant-of-a'"))
        await run(bench, tools, batch)
    assert salts == {"a": "tenant-of-a", "b": "tenant-of-b"}


async def test_line_that_alone_is_refused_fails_in_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(runner, "LONGEST_WAIT_SECONDS", 0.001)

    def frontend(request: httpx.Request) -> httpx.Response:
        is_bad = json.loads(request.content)["n"] == 2
        return httpx.Response(503, json={"message": "it crashed workers"}) if is_bad else answer(request)

    found, good, bad = await run(bench, bench.tools(frontend, 2), bench.begin(30))
    assert (len(good), bad, found.failed) == (29, [503], 1)


async def test_gateway_that_lost_a_batch_changes_nothing(bench: Bench) -> None:
    go = asyncio.Event()

    async def slow(request: httpx.Request) -> httpx.Response:
        await go.wait()
        return answer(request)

    batch = bench.begin(5)
    tools = bench.tools()
    away = httpx.AsyncClient(transport=httpx.MockTransport(slow), base_url="http://f")
    waiting = replace(tools, frontend=away, line_slots=TenantSlots(lambda: 4))
    first = asyncio.ensure_future(Run(waiting, bench.claim(batch, "one"), "one").run())
    while waiting.line_slots.total == 0:
        await asyncio.sleep(0)
    bench.run(lambda t: None)  # after what the first has asked of the database, also to stay its owner
    bench.now += 100
    await Run(tools, bench.claim(batch, "two"), "two").run()
    go.set()
    with pytest.raises(NotOurs):
        await first
    found, good, _ = bench.ended(batch)
    assert (found.completed, good) == (5, ids(*range(5)))


async def test_answers_that_are_not_on_the_disk_are_asked_for_again(bench: Bench) -> None:
    batch = bench.begin(3)
    bench.claim(batch, "one")
    bench.run(lambda t: bench.store.checked(t, batch.id, "one", 3, []))
    bench.run(lambda t: bench.store.add(t, batch.id, "one", [Answer(2, 0, 100, False, (1, 0, 1, 0))]))
    bench.now += 100
    tools = bench.tools()
    await Run(tools, bench.claim(batch, "two"), "two").run()
    found, good, _ = bench.ended(batch)
    assert (found.completed, good) == (3, ids(0, 1, 2))


def test_one_line_runs_at_a_time_while_the_deployment_is_busy() -> None:
    assert [allowed(4, busy) for busy in (0.0, 0.5, 0.9, 1.0, 5.0, -1.0)] == [4, 2, 1, 1, 1, 4]


class RaisingGate(OpenGate):
    """Raises what the numbers or the depth of a line can make a gate raise."""

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        match json.loads(body)["n"]:
            case 1:
                raise OverflowError("int too big")
            case 2:
                raise RecursionError("too deep")
            case 3:
                raise KeyError("a defect")
        return await super().admit(request_id, key_id, path, body)


async def test_line_that_cannot_be_run_fails_alone(bench: Bench) -> None:
    tools = replace(bench.tools(), gate=RaisingGate())
    found, good, bad = await run(bench, tools, bench.begin(5))
    assert (found.status, good, bad) == ("completed", ids(0, 4), [400, 400, 500])


async def test_answer_that_cannot_be_read_fails_its_line_alone(bench: Bench) -> None:
    deep = b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b",\n}"

    def frontend(request: httpx.Request) -> httpx.Response:
        content = (deep, b"\xff\n", b'{"id": "x"}')[json.loads(request.content)["n"]]
        return httpx.Response(200, content=content)

    found, good, bad = await run(bench, bench.tools(frontend), bench.begin(3))
    assert (found.status, good, bad) == ("completed", ids(2), [502, 502])


async def test_full_disk_is_not_the_fault_of_a_line(bench: Bench) -> None:
    class FullGate(OpenGate):
        async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
            raise sqlite3.OperationalError("database or disk is full")

    batch = bench.begin(2)
    tools = replace(bench.tools(), gate=FullGate())
    with pytest.raises(sqlite3.OperationalError):
        await run(bench, tools, batch)
    assert bench.state(batch).failed == 0


async def test_lines_without_an_answer_have_an_error_even_if_nobody_can_read_them(tmp_path: Path) -> None:
    source, errors = tmp_path / "in.jsonl", tmp_path / "errors.jsonl"
    lines = ['{"custom_id": "a", "body": 1}', "[" * 200_000, "nonsense", '{"custom_id": "d", "body": 1}']
    source.write_text("\n".join(lines))
    late = functools.partial(answers.unanswered, "batch_1", Fault("late", "too late", None))
    count, size = parts.add_unanswered(source, {1}, errors, late)
    written = [json.loads(line) for line in errors.read_text().splitlines()]
    assert (count, size) == (3, errors.stat().st_size)
    assert [one["custom_id"] for one in written] == [None, None, "d"]


class RevokedGate(OpenGate):
    """Knows the key for some questions."""

    def __init__(self, good_questions: int) -> None:
        self.good_questions = good_questions
        self.questions = 0

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        self.questions += 1
        if self.questions > self.good_questions:
            raise GatewayError(401, "the key is no longer valid", code="invalid_api_key")
        return await super().admit(request_id, key_id, path, body)


async def test_batch_of_a_revoked_key_ends_without_a_question_for_each_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "REFUSED_SECONDS", 0.0)
    gate = RevokedGate(3)
    tools = replace(bench.tools(concurrency=1), gate=gate)
    state, good, errors = await run(bench, tools, bench.begin(900))
    assert (state.status, good, errors) == ("completed", ids(0, 1, 2), [401] * 897)
    assert (state.completed, state.failed) == (3, 897)
    assert gate.questions < 10
    assert not state.shown()["errors"]


async def test_key_that_this_gateway_does_not_know_yet_is_asked_about_again(bench: Bench) -> None:
    class LateGate(OpenGate):
        questions = 0

        async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
            self.questions += 1
            if self.questions == 1:
                raise GatewayError(401, "this key is new")
            return await super().admit(request_id, key_id, path, body)

    _, good, bad = await run(bench, replace(bench.tools(), gate=LateGate()), bench.begin(5))
    assert (good, bad) == (ids(*range(5)), [])


async def test_answers_fill_what_the_tenant_may_keep_and_no_more(bench: Bench) -> None:
    def frontend(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={**ANSWER, "text": "x" * 300_000})

    tools = bench.tools(frontend, 1)
    found, good, bad = await run(bench, tools, bench.begin(100))
    assert found.status == "failed" and '"storage_full"' in (found.errors or "")
    assert 30 < len(good) < 60 and (found.completed, found.failed, bad) == (len(good), 100 - len(good), [])
    found, good, bad = await run(bench, tools, bench.begin(100))
    assert (found.status, good, bad, found.output_file, found.error_file) == ("failed", [], [], None, None)
    assert (await run(bench, tools, bench.begin(1, "b")))[0].status == "completed"
