"""Requests without a client: under their key's limits, with its tenant's cache salt, and stopped with it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dynamo_vllm.gateway import cost, identity
from dynamo_vllm.gateway.control.deferred_requests import DeferredRequests
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.deferred import NotYet
from dynamo_vllm.gateway.fairness import FairShares
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store import keys
from dynamo_vllm.gateway.store.key_ring import KeyRing
from dynamo_vllm.gateway.store.keys import Key, Limits, Scopes
from dynamo_vllm.gateway.store.limits import Limiter
from harness.refusals import refused

CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "max_tokens": 100, "nvext": {"cache_salt": "alice"}, "cache_salt": "alice"}'


class Gateway:
    """Keys of two tenants, and what decides about their deferred requests."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.shares = FairShares()
        self.limits = Limiter(database, "process-1")
        self.ring = KeyRing(database)
        self.ended: list[str] = []

    async def key(self, tenant: str, **settings: Any) -> Key:
        key, _ = await self.database.run(keys.create(f"of {tenant}", tenant=tenant, **settings))
        await self.ring.refresh()
        return key

    def gate(self, *, is_batch: bool = False, share_cache: bool = False) -> DeferredRequests:
        shares = None if is_batch else self.shares
        parts = (self.ring, self.limits, "ledger", self.ended.append)
        return DeferredRequests(*parts, shares=shares, share_cache=share_cache)


@pytest.fixture
def gateway(database: Database) -> Gateway:
    return Gateway(database)


async def test_each_tenant_has_its_own_cache_salt_whatever_the_body_says(gateway: Gateway) -> None:
    for tenant in ("alice", "mallory"):
        key = await gateway.key(tenant)
        for is_batch in (True, False):
            headers = await gateway.gate(is_batch=is_batch).admit(f"{tenant}{is_batch}", key.id, CHAT, BODY)
            assert headers[identity.CACHE_SALT] == tenant
    assert identity.CACHE_SALT not in await gateway.gate(share_cache=True).admit("r", key.id, CHAT, BODY)


async def test_no_number_of_a_line_reopens_or_locks_a_budget(gateway: Gateway) -> None:
    key = await gateway.key("a", limits=Limits(tokens_per_day=5000))
    gate, path = gateway.gate(is_batch=True), "/v1/responses"
    first = b'{"model": "m", "max_output_tokens": 4900}'
    await gate.admit("before", key.id, path, first)
    for number in ("-1000000000000", "1e300", "1" + "0" * 30, "[]", '"x"', "null"):
        body = f'{{"model": "m", "input": "hi", "max_completion_tokens": {number}}}'.encode()
        with pytest.raises((NotYet, GatewayError)):
            await gate.admit("odd", key.id, path, body)
        row = gateway.database.run_now(lambda t: t.one("SELECT day_tokens FROM gateway_counters"))
        assert row == (cost.of_body(path, first),), number


async def test_nobody_waits_inside_for_limits_and_the_second_try_is_admitted(gateway: Gateway) -> None:
    key = await gateway.key("a", limits=Limits(concurrent=1, requests_per_minute=60))
    gate = gateway.gate()
    await gate.admit("r1", key.id, CHAT, BODY)
    with pytest.raises(NotYet) as refusal:
        await gate.admit("r2", key.id, CHAT, BODY)
    assert 0 < refusal.value.seconds <= 60
    gate.ended("r1")
    await gateway.limits.ended(gateway.ended)
    await gate.admit("r2", key.id, CHAT, BODY)
    assert gateway.shares.in_flight == 1


async def test_a_tenant_with_more_than_its_part_of_the_engines_waits(gateway: Gateway) -> None:
    gateway.shares.slots = 10.0
    busy, quiet = await gateway.key("busy"), await gateway.key("quiet")
    gate = gateway.gate()
    gateway.shares.must_wait("quiet")  # it was here a moment ago
    running = 0
    with pytest.raises(NotYet):
        for running in range(100):
            await gate.admit(f"b{running}", busy.id, CHAT, BODY)
    assert 5 <= running < 10
    await gate.admit("q1", quiet.id, CHAT, BODY)


@pytest.mark.parametrize("end", ["revoked", "expired", "unknown"])
async def test_a_key_that_has_ended_lets_nothing_in(gateway: Gateway, end: str) -> None:
    key = await gateway.key("a", expires=time.time() - 1 if end == "expired" else None)
    if end == "revoked":
        await gateway.database.run(keys.revoke(key.id))
        await gateway.ring.refresh()
    key_id = "nobody" if end == "unknown" else key.id
    gate = gateway.gate()
    assert not gate.is_valid(key_id)
    with refused(401):
        await gate.admit("r1", key_id, CHAT, BODY)


async def test_a_key_is_asked_for_its_path_and_model(gateway: Gateway) -> None:
    key = await gateway.key("a", scopes=Scopes(models=("m",), endpoints=("chat",)))
    gate = gateway.gate()
    await gate.admit("r1", key.id, CHAT, BODY)
    for path, body in ((CHAT, b'{"model": "other"}'), (CHAT, b"{}"), ("/v1/embeddings", BODY)):
        with refused(403):
            await gate.admit("r2", key.id, path, body)


async def test_envoys_word_about_the_clients_request_leaves_what_it_left_to_do(gateway: Gateway) -> None:
    key = await gateway.key("a")
    gate = gateway.gate()
    gateway.shares.enter("r1", "a", "normal")
    await gate.admit("r1", key.id, CHAT, BODY)
    gateway.shares.leave("r1")
    assert gateway.shares.in_flight == 1
    assert gateway.shares.forget_lost(0) == [] and gateway.shares.forget() == []
    gate.ended("r1")
    assert gateway.shares.in_flight == 0
