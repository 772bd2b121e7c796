"""Any order and repetition of records gives the same sums."""

from __future__ import annotations

import asyncio
import functools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_vllm.gateway.store import keys, usage
from dynamo_vllm.gateway.store.buckets import DAY
from dynamo_vllm.gateway.store.records import NOTHING, Part, Place, Sums, usage_of
from dynamo_vllm.serving.usage.record import UsageRecord
from harness.gateway_store import NOON, Store, record

RECORDS = st.builds(
    record,
    request_id=st.sampled_from(["r1", "r2"]),
    part=st.sampled_from(["a", "b"]),
    prompt=st.integers(0, 20),
    completion=st.integers(0, 20),
    cached_tokens=st.integers(0, 3),
    outcome=st.sampled_from(["finished", "aborted", "moved", "failed"]),
    at=st.sampled_from([float(NOON), float(NOON + DAY)]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(RECORDS, min_size=1, max_size=6).flatmap(lambda some: st.tuples(st.just(some), repeated(some)))
)
def test_order_and_repetition_change_nothing(
    store: Store, given: tuple[list[UsageRecord], list[UsageRecord]]
) -> None:
    records, again = given
    assert settled(store, [records]) == settled(store, [[one] for one in again]) == summed(records)


def repeated(records: list[UsageRecord]) -> st.SearchStrategy[list[UsageRecord]]:
    return st.lists(st.sampled_from(records), max_size=4).flatmap(
        lambda more: st.permutations(records + more)
    )


def settled(store: Store, lists: list[list[UsageRecord]]) -> dict[Place, Sums]:
    """Return the sums after the records came in these lists, to an empty ledger."""
    store.database.run_now(
        lambda t: [t.execute(f"DELETE FROM gateway_usage{name}") for name in ("", "_parts", "_totals")]
    )

    async def settle() -> None:
        for some in lists:
            await store.ledger.settle(some)

    asyncio.run(settle())
    found = store.database.run_now(usage.usage(0, 1e11, usage.GROUPS))
    places = {Place(u.day or 0, u.key or "", u.tenant or "", u.model or ""): u.sums for u in found}
    totals = store.database.run_now(usage.totals())
    assert list(totals.values()) == [functools.reduce(Sums.plus, places.values())]
    return {place: sums for place, sums in places.items() if sums != NOTHING}


def summed(records: list[UsageRecord]) -> dict[Place, Sums]:
    """Return the same without a database."""
    parts: dict[str, dict[str, Part]] = {}
    for one in records:
        part = Part.of(one, "default")
        known = parts.setdefault(one.request_id, {})
        known[one.part] = known[one.part].merged(part) if one.part in known else part
    found: dict[Place, Sums] = {}
    for some in parts.values():
        for place, sums in usage_of(some.values()).items():
            found[place] = found.get(place, NOTHING).plus(sums)
    return {place: sums for place, sums in found.items() if sums != NOTHING}


def test_split_of_a_moved_request_is_the_clients() -> None:
    first = Part.of(record(prompt=100, completion=20, cached_tokens=64, outcome="moved"), "t")
    second = Part.of(record(prompt=120, completion=30, cached_tokens=96), "t")
    (sums,) = usage_of([first.merged(second)]).values()
    assert sums == Sums(1, 100, 64, 50)
    assert first.merged(second) == second.merged(first) == first.merged(second).merged(first)


async def test_tenant_is_that_of_the_keys_row_also_at_a_later_time(store: Store) -> None:
    key, _ = await store.database.run(keys.create("k", tenant="acme"))
    for request_id in ("t1", "t2"):
        await store.ledger.settle([record(request_id, key_id=key.id, model="other")])
    await store.database.run(keys.revoke(key.id))
    await store.ledger.settle([record("t3", key_id=key.id, model="other")])
    found = await store.database.run(usage.usage(0, 1e11, ("tenant", "model")))
    assert [u.sums.requests for u in found if (u.tenant, u.model) == ("acme", "other")] == [3]
