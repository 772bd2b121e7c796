"""A batch in one process: a busy frontend, gateways that lose the batch, answers that the disk lost."""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from dynamo_vllm.gateway import identity, schema
from dynamo_vllm.gateway.batches import parts, runner
from dynamo_vllm.gateway.batches.files import PURPOSE, FileStore
from dynamo_vllm.gateway.batches.pace import Pace
from dynamo_vllm.gateway.batches.runner import NotOurs, Run, Tools
from dynamo_vllm.gateway.batches.store import Answer, Batch, BatchStore
from dynamo_vllm.gateway.database import Database, Transaction
from harness.open_gate import OpenGate

T = TypeVar("T")
CHAT = "/v1/chat/completions"
ANSWER = {"id": "x", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
Handler = Callable[[httpx.Request], httpx.Response]


class Bench:
    """A database, a folder and a frontend that answers as it is told."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.folder = folder
        self.database = Database(f"sqlite:///{folder / 'g.db'}", schema.ALL)
        self.store = BatchStore(stale_seconds=20, clock=lambda: self.now)
        self.files = FileStore(self.database, folder, days=1, file_bytes=10**6, tenant_bytes=10**7)

    def tools(self, frontend: Handler, concurrency: int = 4) -> Tools:
        client = httpx.AsyncClient(transport=httpx.MockTransport(frontend), base_url="http://f")
        return Tools(
            database=self.database,
            store=self.store,
            files=self.files,
            frontend=client,
            apis=client,
            pace=Pace(concurrency, lambda: 0.0),
            parts=self.folder / "parts",
            concurrency=concurrency,
            gate=OpenGate(),
            most_lines=1000,
            beat_seconds=5,
        )

    def run(self, work: Callable[[Transaction], T]) -> T:
        return self.database.run_now(work)

    def begin(self, count: int, tenant: str = "a", **fields: object) -> Batch:
        body = {"model": "m", **fields}
        lines = (
            json.dumps({"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": {**body, "n": n}})
            for n in range(count)
        )
        return self.begin_with("\n".join(lines).encode(), tenant)

    def begin_with(self, content: bytes, tenant: str = "a") -> Batch:
        file_id = f"file-{secrets.token_hex(4)}"
        self.files.path(file_id).write_bytes(content)
        self.run(lambda t: self.files.add(t, file_id, tenant, PURPOSE, "in", 1))
        return self.run(
            lambda t: self.store.create(
                t,
                tenant=tenant,
                key_id=tenant,
                endpoint=CHAT,
                file_id=file_id,
                window=("24h", 1e12),
                metadata=None,
            )
        )

    def claim(self, batch: Batch, owner: str) -> Batch:
        found = self.run(lambda t: self.store.claim(t, batch.id, owner))
        assert found is not None
        return found

    def ended(self, batch: Batch) -> tuple[Batch, list[str], list[int]]:
        """The batch, the ids in its output, and the statuses in its errors."""
        found = self.run(lambda t: self.store.get(t, batch.id, "a"))
        texts = [
            self.files.path(name).read_text().splitlines() if name else []
            for name in (found.output_file, found.error_file)
        ]
        good, bad = ([json.loads(text) for text in part] for part in texts)
        return found, [one["custom_id"] for one in good], [one["response"]["status_code"] for one in bad]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.database.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FIRST_WAIT_SECONDS", 0.0001)


async def test_busy_frontend_is_asked_again_with_the_same_id(bench: Bench) -> None:
    asked: Counter[str] = Counter()
    headers: dict[str, str] = {}

    def frontend(request: httpx.Request) -> httpx.Response:
        headers.update(request.headers)
        name = request.headers["x-dynamo-meta-gateway"]
        asked[name] += 1
        if asked[name] == 3:
            return httpx.Response(200, json=ANSWER)
        if asked[name] == 2:
            raise httpx.ReadError("gone", request=request)
        return httpx.Response((429, 503, 529)[len(asked) % 3])

    batch = bench.begin(6)
    await Run(bench.tools(frontend), bench.claim(batch, "one"), "one").run()
    found, good, bad = bench.ended(batch)
    assert (found.status, good, bad) == ("completed", [f"c{n}" for n in range(6)], [])
    assert asked == {f"{batch.id}-{n} a ledger": 3 for n in range(1, 7)}
    assert (found.input_tokens, found.output_tokens) == (18, 12)
    assert headers["x-dynamo-request-priority"] == "-5"


class SaltedGate(OpenGate):
    """Gives each key the cache salt of its tenant, as the gateway's does."""

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        headers = await super().admit(request_id, key_id, path, body)
        return {**headers, identity.CACHE_SALT: f"tenant-of-{key_id}"}


async def test_cache_salt_is_that_of_the_key_whatever_the_row_and_the_line_say(bench: Bench) -> None:
    salts: dict[str, tuple[str, bytes]] = {}

    def frontend(request: httpx.Request) -> httpx.Response:
        name = request.headers[identity.METERED].split()[1]
        salts[name] = request.headers[identity.CACHE_SALT], request.content
        return httpx.Response(200, json=ANSWER)

    tools = replace(bench.tools(frontend), gate=SaltedGate())
    for tenant in ("a", "b"):
        odd = {"cache_salt": "tenant-of-a", "nvext": {"cache_salt": "tenant-of-a"}}
        batch = bench.begin(1, tenant, **odd)
        bench.run(lambda t: t.execute("UPDATE gateway_batches SET cache_salt = 'tenant-of-a'"))
        await Run(tools, bench.claim(batch, "one"), "one").run()
    assert {name: salt for name, (salt, _) in salts.items()} == {"a": "tenant-of-a", "b": "tenant-of-b"}


async def test_line_that_alone_is_refused_fails_in_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(runner, "LONGEST_WAIT_SECONDS", 0.001)

    def frontend(request: httpx.Request) -> httpx.Response:
        is_bad = json.loads(request.content)["n"] == 2
        return httpx.Response(503, json={"message": "it crashed workers"}) if is_bad else good_answer

    good_answer = httpx.Response(200, json=ANSWER)
    batch = bench.begin(30)
    await Run(bench.tools(frontend, 2), bench.claim(batch, "one"), "one").run()
    found, good, bad = bench.ended(batch)
    assert (len(good), bad, found.failed) == (29, [503], 1)


async def test_gateway_that_lost_a_batch_changes_nothing(bench: Bench) -> None:
    go = asyncio.Event()

    async def slow(request: httpx.Request) -> httpx.Response:
        await go.wait()
        return httpx.Response(200, json=ANSWER)

    batch = bench.begin(5)
    tools = bench.tools(lambda request: httpx.Response(200, json=ANSWER))
    away = httpx.AsyncClient(transport=httpx.MockTransport(slow), base_url="http://f")
    waiting = replace(tools, frontend=away, pace=Pace(4, lambda: 0.0))
    first = asyncio.ensure_future(Run(waiting, bench.claim(batch, "one"), "one").run())
    while waiting.pace.running == 0:
        await asyncio.sleep(0)
    bench.run(lambda t: None)  # after what the first has asked of the database, also to stay its owner
    bench.now += 100
    await Run(tools, bench.claim(batch, "two"), "two").run()
    go.set()
    with pytest.raises(NotOurs):
        await first
    found, good, _ = bench.ended(batch)
    assert (found.completed, good) == (5, [f"c{n}" for n in range(5)])


async def test_answers_that_are_not_on_the_disk_are_asked_for_again(bench: Bench) -> None:
    batch = bench.begin(3)
    bench.claim(batch, "one")
    bench.run(lambda t: bench.store.checked(t, batch.id, "one", 3, []))
    bench.run(lambda t: bench.store.add(t, batch.id, "one", [Answer(2, 0, 100, False, (1, 0, 1, 0))]))
    bench.now += 100
    tools = bench.tools(lambda request: httpx.Response(200, json=ANSWER))
    await Run(tools, bench.claim(batch, "two"), "two").run()
    found, good, _ = bench.ended(batch)
    assert (found.completed, good) == (3, ["c0", "c1", "c2"])


async def test_one_line_runs_at_a_time_while_the_deployment_is_busy() -> None:
    load = [1.0]
    pace = Pace(4, lambda: load[0])
    most: list[int] = []

    async def work() -> None:
        async with pace:
            most.append(pace.running)
            await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(5)))
    assert max(most) == 1
    load[0] = 0.5
    await asyncio.gather(*(work() for _ in range(8)))
    assert max(most) == 2
    load[0] = 0.0
    await asyncio.gather(*(work() for _ in range(8)))
    assert max(most) == 4


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
    batch = bench.begin(5)
    tools = replace(bench.tools(lambda request: httpx.Response(200, json=ANSWER)), gate=RaisingGate())
    await Run(tools, bench.claim(batch, "one"), "one").run()
    found, good, bad = bench.ended(batch)
    assert (found.status, good, bad) == ("completed", ["c0", "c4"], [400, 400, 500])


async def test_answer_that_cannot_be_read_fails_its_line_alone(bench: Bench) -> None:
    deep = b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b",\n}"

    def frontend(request: httpx.Request) -> httpx.Response:
        content = (deep, b"\xff\n", b'{"id": "x"}')[json.loads(request.content)["n"]]
        return httpx.Response(200, content=content)

    batch = bench.begin(3)
    await Run(bench.tools(frontend), bench.claim(batch, "one"), "one").run()
    found, good, bad = bench.ended(batch)
    assert (found.status, good, bad) == ("completed", ["c2"], [502, 502])


async def test_full_disk_is_not_the_fault_of_a_line(bench: Bench) -> None:
    class FullGate(OpenGate):
        async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
            raise sqlite3.OperationalError("database or disk is full")

    batch = bench.begin(2)
    tools = replace(bench.tools(lambda request: httpx.Response(200, json=ANSWER)), gate=FullGate())
    with pytest.raises(sqlite3.OperationalError):
        await Run(tools, bench.claim(batch, "one"), "one").run()
    assert bench.run(lambda t: bench.store.get(t, batch.id, "a")).failed == 0


async def test_lines_without_an_answer_have_an_error_even_if_nobody_can_read_them(tmp_path: Path) -> None:
    source, errors = tmp_path / "in.jsonl", tmp_path / "errors.jsonl"
    lines = ['{"custom_id": "a", "body": 1}', "[" * 200_000, "nonsense", '{"custom_id": "d", "body": 1}']
    source.write_text("\n".join(lines))
    count, size = parts.add_unanswered(source, "batch_1", {1}, errors, "late", "too late")
    written = [json.loads(line) for line in errors.read_text().splitlines()]
    assert (count, size) == (3, errors.stat().st_size)
    assert [one["custom_id"] for one in written] == [None, None, "d"]
