"""Whatever becomes known of requests, in any order: in the end the counters contain what was used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.store.limits import RECORD_SECONDS, Admitted
from dynamo_vllm.serving.usage.record import UsageRecord
from harness.gateway_store import DEFAULT, NOON, Store, opened, record, with_limits

KEY = with_limits(requests_per_minute=1000, tokens_per_minute=10_000, tokens_per_day=10_000, concurrent=10)
REQUESTS = ("r0", "r1")
NEWS = st.one_of(
    st.tuples(st.sampled_from(["ended", "release", "expire", "again"]), st.sampled_from(REQUESTS)),
    st.builds(
        record,
        request_id=st.sampled_from(REQUESTS),
        part=st.sampled_from("ab"),
        prompt=st.integers(1, 40),
        completion=st.integers(0, 40),
        outcome=st.sampled_from(["moved", "finished", "aborted"]),
    ),
)


@pytest.fixture
def stores(database: Database, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    other = opened(f"sqlite:///{tmp_path}/gateway.db")
    yield Store(database, "g1"), Store(other, "g2")
    other.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NEWS, max_size=8), st.integers(0, 2))
def test_counters_contain_what_was_used(
    stores: tuple[Store, Store], news: list[tuple[str, str] | UsageRecord], parts: int
) -> None:
    asyncio.run(lived(stores, news, parts))
    database = stores[0].database
    counter = database.run_now(
        lambda t: t.one("SELECT requests, tokens, day_tokens, running FROM gateway_counters")
    )
    largest: dict[tuple[str, str], int] = {}
    for one in news:
        if isinstance(one, UsageRecord):
            part = one.request_id, one.part
            largest[part] = max(largest.get(part, 0), one.prompt_tokens + one.completion_tokens)
    used = sum(largest.values())
    assert counter == (len(REQUESTS), used, used, 0)
    assert database.run_now(lambda t: t.all("SELECT 1 FROM gateway_reservations WHERE is_open = 1")) == []


async def lived(stores: tuple[Store, Store], news: list[tuple[str, str] | UsageRecord], parts: int) -> None:
    """Admit requests, hear the news at either gateway, and then that all requests have ended."""
    tables = ("gateway_counters", "gateway_reservations", "gateway_usage_parts", "gateway_usage")
    stores[0].database.run_now(lambda t: [t.execute(f"DELETE FROM {name}") for name in tables])
    for request_id in REQUESTS:
        admitted = await stores[0].limiter.admit(request_id, KEY, DEFAULT, 50, parts=parts, now=NOON)
        assert isinstance(admitted, Admitted)
    for number, one in enumerate(news):
        store = stores[number % 2]
        if isinstance(one, UsageRecord):
            await store.ledger.settle([one])
        elif one[0] == "ended":
            await store.limiter.ended([one[1]], now=NOON)
        elif one[0] == "release":
            await store.limiter.release([one[1]], now=NOON)
        elif one[0] == "again":  # without a client, at this gateway from now on
            again = await store.limiter.admit(one[1], KEY, DEFAULT, 70, is_deferred=True, now=NOON)
            assert isinstance(again, Admitted)
        else:
            await store.limiter.expire(NOON + 1, now=NOON)
    for store in stores:
        await store.limiter.ended(REQUESTS, now=NOON)
    await stores[1].limiter.expire(NOON, now=NOON + RECORD_SECONDS + 1)
