"""What the gateway's store must do in any database: unit tests run it in SQLite, others in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.gateway import schema
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.store import keys, usage
from dynamo_vllm.gateway.store.buckets import DAY
from dynamo_vllm.gateway.store.key_ring import KeyRing, NoKey
from dynamo_vllm.gateway.store.keys import Key, Limits, Tenant
from dynamo_vllm.gateway.store.ledger import Ledger
from dynamo_vllm.gateway.store.limits import RECORD_SECONDS, Admitted, Limiter, Refused
from dynamo_vllm.gateway.store.records import Sums
from dynamo_vllm.serving.usage.record import UsageRecord

NOON = 20_000 * DAY + DAY // 2
"""Of some day."""
PLAIN = Key("key-1", "dv-aaaaaaaa", "one")
DEFAULT = Tenant()


def opened(url: str) -> Database:
    return Database(url, schema.ALL)


def with_limits(**limits: int) -> Key:
    return Key("key-1", "dv-aaaaaaaa", "one", limits=Limits(**limits))


def record(
    request_id: str = "r1", part: str = "p1", prompt: int = 10, completion: int = 5, **more: Any
) -> UsageRecord:
    values: dict[str, Any] = {
        "key_id": "key-1",
        "model": "m",
        "cached_tokens": 0,
        "outcome": "finished",
        "at": float(NOON),
        **more,
    }
    return UsageRecord(
        request_id=request_id, part=part, prompt_tokens=prompt, completion_tokens=completion, **values
    )


def used(database: Database) -> Sums:
    """All that was ever used."""
    found = database.run_now(usage.usage(0, 1e11, ()))
    return found[0].sums if found else Sums()


class Store:
    """One gateway."""

    def __init__(self, database: Database, name: str = "g1") -> None:
        self.database = database
        self.limiter = Limiter(database, name)
        self.ledger = Ledger(database)
        self.ring = KeyRing(database)

    async def remaining(self, key: Key, tenant: Tenant = DEFAULT, now: float = NOON) -> int:
        """Return the tokens left in the bucket, by a question for too many."""
        answer = await self.limiter.admit("question", key, tenant, 10**9, now=now)
        assert isinstance(answer, Refused) and answer.tokens is not None
        return answer.tokens.remaining


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """For a test's conftest: a database of the gateway, empty for each test."""
    database = opened(f"sqlite:///{tmp_path}/gateway.db")
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


class TwoGateways:
    """Tests with two gateways in one database; `open_database` opens it once more."""

    @pytest.fixture
    def open_database(self) -> Callable[[], Database]:
        raise NotImplementedError

    @pytest.fixture
    def stores(self, open_database: Callable[[], Database]) -> Iterator[tuple[Store, Store]]:
        databases = open_database(), open_database()
        yield Store(databases[0], "g1"), Store(databases[1], "g2")
        for database in databases:
            database.close()

    # --- keys ---

    async def test_key_is_found_by_its_secret_at_another_gateway(self, stores: tuple[Store, Store]) -> None:
        one, other = stores
        made = keys.create(
            "build",
            tenant="acme",
            scopes=keys.Scopes(models=("m",), endpoints=("chat",)),
            limits=Limits(tokens_per_day=5),
            priority_class=keys.LOW,
        )
        key, secret = await one.database.run(made)
        await other.ring.refresh()
        assert other.ring.find(secret) == key
        assert other.ring.find(secret[:-1] + "!") is NoKey.UNKNOWN
        assert secret.startswith(f"{key.prefix}-") and len(secret) == 52
        rows = await one.database.run(lambda t: t.all("SELECT * FROM gateway_keys"))
        assert secret not in str(rows)

    async def test_revoked_key_ends_at_another_gateway(self, stores: tuple[Store, Store]) -> None:
        one, other = stores
        key, secret = await one.database.run(keys.create("build"))
        assert await other.ring.refresh() and not await other.ring.refresh()
        await one.database.run(keys.revoke(key.id))
        assert await other.ring.refresh()
        assert other.ring.find(secret) is NoKey.REVOKED

    async def test_rotated_key_has_two_secrets_for_a_time(self, stores: tuple[Store, Store]) -> None:
        one, other = stores
        key, first = await one.database.run(keys.create("build", now=NOON))
        await other.ring.refresh()
        _, second = await one.database.run(keys.rotate(key.id, grace_seconds=60, now=NOON))
        await other.ring.refresh()
        for secret in (first, second):
            found = other.ring.find(secret, NOON + 59)
            assert isinstance(found, Key) and found.id == key.id
        assert other.ring.find(first, NOON + 60) is NoKey.ROTATED
        _, third = await one.database.run(keys.rotate(key.id, now=NOON))
        for ring in (other.ring, KeyRing(other.database)):  # the changes alone, and everything anew
            await ring.refresh()
            assert [ring.find(secret, NOON) for secret in (first, second)] == [NoKey.ROTATED] * 2
            assert isinstance(ring.find(third, NOON), Key)

    async def test_tenant_is_changed_in_parts(self, stores: tuple[Store, Store]) -> None:
        one, other = stores
        await one.database.run(keys.set_tenant(Tenant("acme", Limits(concurrent=3), keys.HIGH, True)))
        await other.ring.refresh()
        assert other.ring.tenant("acme") == Tenant("acme", Limits(concurrent=3), keys.HIGH, True)
        assert other.ring.tenant("new") == Tenant("new")

    # --- limits ---

    async def test_two_gateways_share_a_limit(self, stores: tuple[Store, Store]) -> None:
        key = with_limits(requests_per_minute=50, tokens_per_minute=10_000, concurrent=30)
        tenant = Tenant("t", Limits(tokens_per_minute=200))
        asked = [stores[n % 2].limiter.admit(f"r{n}", key, tenant, 10, now=NOON) for n in range(100)]
        answers = await asyncio.gather(*asked)
        assert sum(isinstance(answer, Admitted) for answer in answers) == 20
        row = await stores[0].database.run(
            lambda t: t.all("SELECT subject, tokens, running FROM gateway_counters ORDER BY subject")
        )
        assert row == [("key key-1", 200, 20), ("tenant t", 200, 20)]

    async def test_limit_holds_under_load_from_two_gateways(self, stores: tuple[Store, Store]) -> None:
        """Keys of two tenants in mixed order: no request too many, and no wait for a deadlock to be found."""
        tenants = [Tenant(name, Limits(tokens_per_minute=300)) for name in ("a", "b")]
        made = [
            Key(f"key-{n}", f"dv-{n}", "k", tenant=tenants[n % 2].name, limits=Limits(concurrent=40))
            for n in range(6)
        ]

        async def ask(n: int) -> str | None:
            store, key, tenant = stores[n % 2], made[n * 7 % 6], tenants[n * 7 % 2]
            answer = await store.limiter.admit(f"r{n}", key, tenant, 5, now=NOON)
            await store.database.run(lambda t: t.all("SELECT version FROM gateway_version"))
            return tenant.name if isinstance(answer, Admitted) else None

        answers = await asyncio.gather(*(ask(n) for n in range(400)))
        assert (answers.count("a"), answers.count("b")) == (60, 60)

    async def test_request_admitted_twice_is_counted_once(self, stores: tuple[Store, Store]) -> None:
        key = with_limits(tokens_per_minute=100, concurrent=1)
        for store in stores:
            assert isinstance(await store.limiter.admit("r1", key, DEFAULT, 60, now=NOON), Admitted)
        assert await stores[0].remaining(key) == 40

    async def test_refused_by_the_tenant_takes_nothing_of_the_key(self, stores: tuple[Store, Store]) -> None:
        key, tenant = with_limits(tokens_per_minute=100), Tenant("t", Limits(concurrent=1))
        one, other = stores
        assert isinstance(await one.limiter.admit("r1", key, tenant, 10, now=NOON), Admitted)
        refused = await other.limiter.admit("r2", key, tenant, 10, now=NOON)
        assert isinstance(refused, Refused) and (refused.kind, refused.status) == ("concurrent", 429)
        assert await one.remaining(key) == 90

    @pytest.mark.parametrize("first", ["record", "ended"])
    async def test_unused_tokens_come_back_once(self, stores: tuple[Store, Store], first: str) -> None:
        one, other = stores
        key = with_limits(tokens_per_minute=100, concurrent=1, tokens_per_day=100)
        await one.limiter.admit("r1", key, DEFAULT, 80, parts=0, now=NOON)

        async def record_comes() -> None:
            await other.ledger.settle([record()])

        async def request_ends() -> None:
            await one.limiter.ended(["r1"], now=NOON)

        steps = [record_comes, request_ends]
        for step in (steps if first == "record" else steps[::-1]) * 2:
            assert await one.remaining(key) in (20, 85)
            await step()
        assert await one.remaining(key) == 85
        assert isinstance(await other.limiter.admit("r2", key, DEFAULT, 85, now=NOON), Admitted)

    async def test_only_part_of_a_request_ends_it(self, stores: tuple[Store, Store]) -> None:
        one, other = stores
        key = with_limits(tokens_per_minute=100, concurrent=1)
        await one.limiter.admit("r1", key, DEFAULT, 80, now=NOON)
        await other.ledger.settle([record(outcome="moved", prompt=10, completion=2)])
        assert isinstance(await one.limiter.admit("r2", key, DEFAULT, 1, now=NOON), Refused)
        await other.ledger.settle([record(prompt=12, completion=3)])
        assert await one.remaining(key) == 85
        assert isinstance(await one.limiter.admit("r2", key, DEFAULT, 85, now=NOON), Admitted)

    async def test_released_request_counts_as_request_only(self, stores: tuple[Store, Store]) -> None:
        one, other = stores
        key = with_limits(requests_per_minute=1, tokens_per_minute=100, tokens_per_day=100, concurrent=1)
        await one.limiter.admit("r1", key, DEFAULT, 80, now=NOON)
        await other.limiter.release(["r1", "unknown"], now=NOON)
        await other.limiter.release(["r1"], now=NOON)
        refused = await one.limiter.admit("r2", key, DEFAULT, 100, now=NOON)
        assert isinstance(refused, Refused) and refused.kind == "requests_per_minute"
        assert refused.tokens is not None and refused.tokens.remaining == 100

    async def test_reservations_of_a_dead_gateway_expire(self, stores: tuple[Store, Store]) -> None:
        one, other = stores
        key = with_limits(tokens_per_minute=100, concurrent=2)
        await one.limiter.admit("r1", key, DEFAULT, 60, now=NOON)
        await other.limiter.admit("r2", key, DEFAULT, 40, now=NOON)
        assert await other.limiter.expire(NOON, now=NOON) == 0
        assert await other.limiter.expire(NOON + 1, gateway="g1", now=NOON) == 1
        assert await other.remaining(key) == 60
        await other.limiter.ended(["r2"], now=NOON)
        assert await other.limiter.expire(NOON, now=NOON + RECORD_SECONDS + 1) == 1
        assert await other.remaining(key) == 100

    # --- usage ---

    async def test_usage_is_grouped(self, stores: tuple[Store, Store]) -> None:
        one, _ = stores
        key, _ = await one.database.run(keys.create("k", tenant="acme"))
        await one.ledger.settle(
            [
                record("r1", "a", key_id=key.id),
                record("r1", "b", key_id=key.id),
                record("r2", key_id="flag-1", model="n"),
                record("r3", key_id="flag-1", at=NOON + DAY),
            ]
        )
        found = await one.database.run(usage.usage(NOON, NOON + 1, ("tenant", "model")))
        assert [(u.tenant, u.model, u.sums) for u in found] == [
            ("acme", "m", Sums(1, 20, 0, 10)),
            ("default", "n", Sums(1, 10, 0, 5)),
        ]
        (day, next_day) = await one.database.run(usage.usage(NOON, NOON + DAY, ("day",)))
        assert (day.day, day.sums.requests, next_day.sums.requests) == (NOON // DAY, 2, 1)
        assert await one.database.run(usage.usage(0, DAY, ())) == []
        assert await one.database.run(usage.totals(1)) == {
            "acme": Sums(1, 20, 0, 10),
            "other": Sums(2, 20, 0, 10),
        }

    async def test_pruned_request_is_not_counted_again(self, stores: tuple[Store, Store]) -> None:
        one, other = stores
        key = with_limits(tokens_per_minute=100)
        await one.limiter.admit("r1", key, DEFAULT, 80, now=NOON)
        await one.ledger.settle([record(), record("r2", "a", at=NOON + 5), record("r2", "b", at=NOON + 15)])
        assert await one.ledger.prune(NOON + 10) == 2  # the record and the reservation of r1
        await other.ledger.settle([record(), record("r2", "b", at=NOON + 15)])
        assert used(one.database) == Sums(2, 30, 0, 15)
