"""Background responses under the limits of their keys, and tenants that take turns."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.control.deferred_requests import DeferredRequests
from dynamo_vllm.gateway.control.endings import Endings
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.deferred import NotYet
from dynamo_vllm.gateway.fairness import FairShares
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.responses import queue
from dynamo_vllm.gateway.responses.items import Item
from dynamo_vllm.gateway.responses.store import New, ResponseStore
from dynamo_vllm.gateway.store import keys
from dynamo_vllm.gateway.store.key_ring import KeyRing
from dynamo_vllm.gateway.store.keys import Limits
from dynamo_vllm.gateway.store.limits import Limiter
from harness.responses_app import PATH, App, Frontend, app, response_of
from harness.waiting import until_async


class LimitedGate:
    """Lets so many requests of a key run at once."""

    def __init__(self) -> None:
        self.concurrent: dict[str, int] = {}
        self.revoked: set[str] = set()
        self.running: dict[str, str] = {}
        self.admitted: list[str] = []
        self.bodies: list[bytes] = []
        self.refused: Counter[str] = Counter()

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        if not self.is_valid(key_id):
            raise GatewayError(401, "the key is no longer valid", code="invalid_api_key")
        if Counter(self.running.values())[key_id] >= self.concurrent.get(key_id, 100):
            self.refused[key_id] += 1
            raise NotYet(0.05)
        assert path == PATH
        self.running[request_id] = key_id
        self.admitted.append(request_id)
        self.bodies.append(body)
        return {identity.PRIORITY: "-7", identity.METERED: f"{request_id} {key_id} ledger"}

    def is_valid(self, key_id: str) -> bool:
        return key_id not in self.revoked

    def ended(self, request_id: str) -> None:
        del self.running[request_id]


class Engine:
    """A frontend whose answers wait for `open`, with the most that ran at once."""

    def __init__(self, frontend: Frontend) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.running: list[str] = []
        self.most = 0
        self.left = asyncio.Event()
        """Set when a request was ended before its answer."""
        frontend.answer = self._answer

    def open(self, text: str) -> None:
        self.gates.setdefault(text, asyncio.Event()).set()

    async def until_running(self, *texts: str) -> None:
        await until_async(f"{texts} to run", lambda: sorted(self.running) == sorted(texts))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        text = body["input"][-1]["content"][0]["text"]
        self.running.append(text)
        self.most = max(self.most, len(self.running))
        try:
            await self.gates.setdefault(text, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        finally:
            self.running.remove(text)
        return httpx.Response(200, json=response_of(body))


@pytest.fixture
def gate() -> LimitedGate:
    return LimitedGate()


@pytest.fixture
async def gateway(tmp_path: Path, gate: LimitedGate) -> AsyncIterator[App]:
    async with app(tmp_path, gate) as running:
        yield running


@pytest.fixture
def engine(gateway: App) -> Engine:
    return Engine(gateway.frontend)


async def until_refused(gate: LimitedGate, key_id: str) -> None:
    await until_async(f"a refusal of {key_id}", lambda: gate.refused[key_id])


async def test_freed_slot_goes_to_the_tenant_with_fewest(tmp_path: Path) -> None:
    async with app(tmp_path, background_concurrency=2) as gateway:
        engine = Engine(gateway.frontend)
        for number in range(3):
            await gateway.queue(f"b{number}", "b")
        await engine.until_running("b0", "b1")
        await gateway.queue("a0", "a")
        engine.open("b0")
        await engine.until_running("a0", "b1")
        await gateway.queue("a1", "a")
        engine.open("b1")
        await engine.until_running("a0", "b2")


async def test_response_that_may_not_start_yet_holds_no_slot(tmp_path: Path, gate: LimitedGate) -> None:
    gate.concurrent["key-b"] = 0
    async with app(tmp_path, gate, background_concurrency=1) as gateway:
        waiting = [await gateway.queue("b", "b") for _ in range(3)]
        await until_refused(gate, "key-b")
        name = await gateway.queue("a", "a")
        await gateway.until(name, "completed")
        assert {(await gateway.get(other, "b"))["status"] for other in waiting} == {"queued"}
        gate.concurrent["key-b"] = 1
        for other in waiting:
            await gateway.until(other, "completed", tenant="b")
    assert gate.running == {}


async def test_limits_of_one_key_leave_other_keys_of_its_tenant_alone(
    tmp_path: Path, gate: LimitedGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ROWS_PER_TENANT", 2)
    gate.concurrent["key-a"] = 0
    async with app(tmp_path, gate, background_concurrency=1) as gateway:
        for _ in range(6):
            await gateway.queue("held")
        name = await gateway.queue("free", headers={"x-gateway-key": "other"})
        await gateway.until(name, "completed")
        assert gate.admitted == [name]


async def test_response_is_sent_with_the_headers_of_the_gate_and_the_name_of_its_request(
    gateway: App, gate: LimitedGate
) -> None:
    sent = {"x-request-id": "the-post", identity.PRIORITY: "99", identity.CACHE_SALT: "a"}
    name = await gateway.queue("hello", headers=sent)
    await gateway.until(name, "completed")
    headers = gateway.frontend.requests[-1].headers
    assert headers[identity.PRIORITY] == "-7"
    assert headers[identity.METERED] == "the-post key-a ledger"
    assert (headers[identity.CACHE_SALT], headers["x-request-id"]) == ("a", "the-post")
    assert identity.KEY not in headers
    assert gate.admitted == ["the-post"]
    assert json.loads(gate.bodies[0])["input"][0]["content"][0]["text"] == "hello"


async def test_response_that_an_earlier_version_queued_runs_with_its_headers(
    gateway: App, gate: LimitedGate
) -> None:
    body = json.dumps({"id": "resp_old", "created_at": 1, "status": "queued"})
    message = Item("msg_1", b'{"type":"message","role":"user","content":"x"}')
    headers = json.dumps({identity.PRIORITY: "3"})
    new = New("resp_old", "a", None, "queued", body, [message], is_background=True, headers=headers)
    await gateway.database.run(lambda t: ResponseStore(1, 1 << 30).keep(t, new))
    await gateway.until("resp_old", "completed")
    assert gateway.frontend.requests[-1].headers[identity.PRIORITY] == "3"
    assert gate.admitted == []


async def test_queued_response_of_a_revoked_key_fails(gateway: App, gate: LimitedGate) -> None:
    gate.concurrent["key-a"] = 0
    name = await gateway.queue("hello")
    await until_refused(gate, "key-a")
    gate.revoked.add("key-a")
    response = await gateway.until(name, "failed")
    assert response["error"] == {"code": "invalid_api_key", "message": "the key is no longer valid"}
    assert gateway.frontend.requests == []


async def test_running_response_of_a_revoked_key_leaves_the_engine_and_fails(
    gateway: App, gate: LimitedGate, engine: Engine
) -> None:
    name = await gateway.queue("long")
    await engine.until_running("long")
    gate.revoked.add("key-a")
    response = await gateway.until(name, "failed")
    assert response["error"]["code"] == "invalid_api_key"
    await asyncio.wait_for(engine.left.wait(), 60)
    assert gate.running == {}


async def test_response_that_ends_early_gives_back_its_slot_and_what_it_reserved(
    tmp_path: Path, gate: LimitedGate
) -> None:
    async with app(tmp_path, gate, background_concurrency=1) as gateway:
        engine = Engine(gateway.frontend)
        names = [await gateway.queue(text) for text in ("first", "second", "third")]
        await engine.until_running("first")
        await gateway.send("DELETE", f"{PATH}/{names[0]}")
        await engine.until_running("second")
        await gateway.send("POST", f"{PATH}/{names[1]}/cancel")
        await engine.until_running("third")
        engine.open("third")
        await gateway.until(names[2], "completed")
        assert gate.admitted == names
    assert gate.running == {}


async def test_response_that_is_cancelled_while_it_waits_never_runs(gateway: App, gate: LimitedGate) -> None:
    gate.concurrent["key-a"] = 0
    name = await gateway.queue("hello")
    await until_refused(gate, "key-a")
    cancelled: dict[str, Any] = (await gateway.send("POST", f"{PATH}/{name}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    gate.concurrent["key-a"] = 1
    other = await gateway.queue("other")
    await gateway.until(other, "completed")
    assert len(gateway.frontend.requests) == 1
    assert (await gateway.get(name))["status"] == "cancelled"


async def test_tenant_with_too_many_queued_responses_gets_429(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "QUEUED_PER_TENANT", 2)
    async with app(tmp_path, background_concurrency=0) as gateway:
        for _ in range(2):
            await gateway.queue("hello")
        refused = await gateway.create("hello", background=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_queued_responses")
        assert (await gateway.create("hello", "b", background=True)).status_code == 200


async def test_limit_of_a_key_holds_and_comes_back_with_the_limiter_of_the_gateway(
    database: Database, tmp_path: Path
) -> None:
    key, _ = await database.run(keys.create("somebody", tenant="a", limits=Limits(concurrent=1)))
    ring, limiter = KeyRing(database), Limiter(database, "process-1")
    await ring.refresh()
    endings = Endings(limiter, "process-1", lambda: None)
    settling = asyncio.create_task(endings.run())
    real = DeferredRequests(ring, limiter, "ledger", endings.ended, shares=FairShares())
    async with app(tmp_path, real) as gateway:
        engine = Engine(gateway.frontend)
        names = [await gateway.queue("same", headers={"x-gateway-key": key.id}) for _ in range(2)]
        await engine.until_running("same")
        engine.open("same")
        for name in names:
            await gateway.until(name, "completed")
        assert engine.most == 1
        assert {request.headers[identity.CACHE_SALT] for request in gateway.frontend.requests} == {"a"}
    settling.cancel()
    await asyncio.gather(settling, return_exceptions=True)
