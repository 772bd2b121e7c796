"""What limits allow, with a clock of the test's own, and what headers and messages say."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from dataclasses import replace

import pytest

from dynamo_vllm.gateway.store import seats
from dynamo_vllm.gateway.store.buckets import DAY, Counter, Window, duration, obstacles, tighter
from dynamo_vllm.gateway.store.holders import DEAD_SECONDS, Holders
from dynamo_vllm.gateway.store.keys import Limits, Tenant
from dynamo_vllm.gateway.store.limits import Admitted, Limiter, Refused
from harness.gateway_store import DEFAULT, NOON, PLAIN, Store, record, with_limits


def test_bucket_refills_continuously_and_never_overflows() -> None:
    limits = Limits(requests_per_minute=60, tokens_per_minute=600)
    counter = Counter("s", updated=NOON)
    for _ in range(60):
        assert obstacles(counter, limits, 10, NOON) == []
        counter.take(10)
    waits = {one.kind: one.wait_seconds for one in obstacles(counter, limits, 10, NOON)}
    assert waits == {"requests_per_minute": 1.0, "tokens_per_minute": 1.0}
    counter.advance(limits, NOON + 0.5)
    assert [one.wait_seconds for one in obstacles(counter, limits, 10, NOON)] == [0.5, 0.5]
    counter.advance(limits, NOON + 0.2)  # the clock of another gateway is behind
    counter.advance(limits, NOON + 1)
    assert obstacles(counter, limits, 10, NOON) == []
    counter.advance(limits, NOON + 1000)
    assert (counter.requests, counter.tokens) == (0, 0)


def test_higher_limit_applies_to_what_was_used_before() -> None:
    counter = Counter("s", updated=NOON, tokens=100)
    assert [one.kind for one in obstacles(counter, Limits(tokens_per_minute=100), 1, NOON)] != []
    assert obstacles(counter, Limits(tokens_per_minute=200), 100, NOON) == []


def test_day_begins_anew_at_midnight_and_yesterdays_requests_do_not_change_it() -> None:
    limits, midnight = Limits(tokens_per_day=100), (NOON // DAY + 1) * DAY
    counter = Counter("s")
    counter.advance(limits, NOON)
    counter.take(90)
    (found,) = obstacles(counter, limits, 20, NOON)
    assert (found.kind, found.wait_seconds) == ("tokens_per_day", midnight - NOON)
    counter.advance(limits, midnight)
    counter.take(20)
    counter.change(-80, NOON // DAY, -1)
    assert (counter.day_tokens, counter.running) == (20, 1)


def test_duration_is_written_as_openai_does() -> None:
    written = [duration(seconds) for seconds in (0, 0.0061, 1, 59.2, 360, 3600, 86399)]
    assert written == ["0s", "7ms", "1s", "1m0s", "6m0s", "1h0m0s", "23h59m59s"]


def test_tighter_window_is_the_one_with_less_left() -> None:
    small, large = Window(100, 5, 57.0), Window(50, 50, 0.0)
    assert tighter(small, large) is tighter(large, small) is tighter(None, small) is small


async def test_without_limits_nothing_is_asked_of_the_database() -> None:
    limiter = Limiter(None, "g1")  # type: ignore[arg-type]
    assert await limiter.admit("r1", PLAIN, DEFAULT, 10**9) == Admitted()


async def test_headers_name_the_tighter_of_key_and_tenant(store: Store) -> None:
    key = with_limits(requests_per_minute=10, tokens_per_minute=1000)
    tenant = Tenant("t", Limits(requests_per_minute=5))
    admitted = await store.limiter.admit("r1", key, tenant, 100, now=NOON)
    assert isinstance(admitted, Admitted) and admitted.is_counted
    assert admitted.headers() == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "12s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "6s",
    }


async def test_refusal_says_when_to_come_again(store: Store) -> None:
    key = with_limits(tokens_per_minute=600)
    await store.limiter.admit("r1", key, DEFAULT, 600, now=NOON)
    refused = await store.limiter.admit("r2", key, DEFAULT, 100, now=NOON)
    assert isinstance(refused, Refused)
    error = refused.error()
    assert (error.status, error.code, error.headers["retry-after"]) == (429, "rate_limit_exceeded", "10")
    assert error.message == (
        "Rate limit reached for key dv-aaaaaaaa: 600 tokens per minute, used 600, requested 100. "
        "Try again in 10s."
    )
    assert isinstance(await store.limiter.admit("r2", key, DEFAULT, 100, now=NOON + 10), Admitted)


async def test_request_that_never_fits_is_refused_for_good(store: Store) -> None:
    for limit in ("tokens_per_minute", "tokens_per_day"):
        refused = await store.limiter.admit("r1", with_limits(**{limit: 99}), DEFAULT, 100, now=NOON)
        assert isinstance(refused, Refused)
        assert (refused.status, refused.retry_after, refused.code) == (400, None, "request_too_large")
        assert "No waiting helps" in refused.message and "retry-after" not in refused.headers()


async def test_client_that_leaves_while_it_is_admitted_keeps_nothing(store: Store) -> None:
    key = with_limits(tokens_per_minute=100, concurrent=1)
    asked = asyncio.create_task(store.limiter.admit("r1", key, DEFAULT, 60, now=NOON))
    waiting = asyncio.create_task(store.limiter.admit("r2", key, DEFAULT, 1, now=NOON))
    await asyncio.sleep(0)  # both wait now
    asked.cancel()
    assert isinstance(await waiting, Refused)
    await store.limiter.ended(["nobody"])  # comes after the release in the line
    assert isinstance(await store.limiter.admit("r3", key, DEFAULT, 100, now=NOON), Admitted)


async def test_a_client_that_leaves_while_the_database_goes_away_keeps_no_seat(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_vllm.gateway.store.limits.RELEASE_PAUSES", (0.001,) * 1000)
    key = with_limits(concurrent=1)
    leaving = asyncio.create_task(store.limiter.admit("r1", key, DEFAULT, 1))
    await asyncio.sleep(0)
    leaving.cancel()
    away = store.database.run(lambda t: t.execute("ALTER TABLE gateway_reservations RENAME TO away"))
    await asyncio.gather(leaving, away, return_exceptions=True)
    await asyncio.sleep(0.01)
    await store.database.run(lambda t: t.execute("ALTER TABLE away RENAME TO gateway_reservations"))
    async with asyncio.timeout(60):
        while isinstance(await store.limiter.admit("r2", key, DEFAULT, 1), Refused):
            await asyncio.sleep(0.01)


async def test_error_of_the_database_reaches_all_who_wait_and_no_one_later(store: Store) -> None:
    key = with_limits(tokens_per_minute=100)
    store.database.run_now(lambda t: t.execute("ALTER TABLE gateway_counters RENAME TO away"))
    asked = [store.limiter.admit(f"r{n}", key, DEFAULT, 1, now=NOON) for n in range(3)]
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in errors] == [sqlite3.OperationalError] * 3
    store.database.run_now(lambda t: t.execute("ALTER TABLE away RENAME TO gateway_counters"))
    assert isinstance(await store.limiter.admit("r1", key, DEFAULT, 1, now=NOON), Admitted)


async def test_a_request_that_cannot_be_decided_fails_alone(store: Store) -> None:
    key, broken = with_limits(tokens_per_minute=100), replace(with_limits(concurrent=1), id="a\ud800")
    requests = [store.limiter.admit(f"r{n}", key, DEFAULT, 1, now=NOON) for n in range(3)]
    bad = store.limiter.admit("bad", broken, DEFAULT, 1, now=NOON)
    *admitted, error = await asyncio.gather(*requests, bad, return_exceptions=True)
    assert isinstance(error, UnicodeEncodeError)
    assert all(isinstance(outcome, Admitted) for outcome in admitted)
    ends = [store.limiter.ended([name], now=NOON) for name in ("r0", "a\ud800")]
    first, second = await asyncio.gather(*ends, return_exceptions=True)
    assert first is None and isinstance(second, UnicodeEncodeError)


@pytest.mark.parametrize("tokens", [-1, -(10**12), -(10**30), 10**30, 1 << 63])
async def test_no_number_of_tokens_empties_a_bucket_or_locks_it_for_long(store: Store, tokens: int) -> None:
    key = with_limits(tokens_per_minute=100, tokens_per_day=100_000)
    other = replace(with_limits(requests_per_minute=1000), id="key-2")
    await store.limiter.admit("r1", key, DEFAULT, 60, now=NOON)
    await store.limiter.admit("r2", other, DEFAULT, tokens, now=NOON)
    outcome = await store.limiter.admit("r3", key, DEFAULT, tokens, now=NOON)
    await store.limiter.release(["r2", "r3"], now=NOON)
    assert isinstance(outcome, Admitted if tokens < 0 else Refused)
    assert await store.remaining(key) == 40


async def test_what_was_used_beyond_the_reservation_locks_a_key_for_an_hour_at_most(store: Store) -> None:
    key = with_limits(tokens_per_minute=100)
    await store.limiter.admit("r1", key, DEFAULT, 1, now=NOON)
    await store.ledger.settle([record(prompt=10**9, completion=5)])
    assert isinstance(await store.limiter.admit("r2", key, DEFAULT, 50, now=NOON + 1800), Refused)
    assert isinstance(await store.limiter.admit("r3", key, DEFAULT, 50, now=NOON + 2 * 3600), Admitted)


@pytest.mark.parametrize("ahead", [60.0, 3600.0, 10 * DAY])
async def test_a_clock_that_was_ahead_stops_nobody(store: Store, ahead: float) -> None:
    key = with_limits(requests_per_minute=10, tokens_per_minute=100, tokens_per_day=1000)
    for n in range(10):
        await store.limiter.admit(f"early-{n}", key, DEFAULT, 10, now=NOON + ahead)
    refused = await store.limiter.admit("r1", key, DEFAULT, 10, now=NOON)
    assert isinstance(refused, Refused) and refused.retry_after == 6
    assert isinstance(await store.limiter.admit("r2", key, DEFAULT, 10, now=NOON + 7), Admitted)
    minutes = [NOON + 60 * (n + 1) for n in range(100)]
    late = [await store.limiter.admit(f"late-{now}", key, DEFAULT, 10, now=now) for now in minutes]
    admitted = sum(isinstance(outcome, Admitted) for outcome in late)
    assert admitted == (1000 - 110) // 10  # the day's tokens are those of one day


async def test_a_seat_that_comes_free_soon_is_waited_for(store: Store) -> None:
    limiter, key = Limiter(store.database, "g1", seat_seconds=60.0), with_limits(concurrent=1)
    assert isinstance(await limiter.admit("r1", key, DEFAULT, 1), Admitted)
    second = asyncio.ensure_future(limiter.admit("r2", key, DEFAULT, 1))
    await limiter.ended(["nobody"])
    assert not second.done()
    await limiter.ended(["r1"])
    assert isinstance(await second, Admitted)


async def test_a_seat_that_stays_taken_is_refused_and_few_wait_for_it(store: Store) -> None:
    limiter, key = Limiter(store.database, "g1", seat_seconds=0.2), with_limits(concurrent=1)
    assert isinstance(await limiter.admit("r1", key, DEFAULT, 1), Admitted)
    waiting = [asyncio.ensure_future(limiter.admit(f"w{n}", key, DEFAULT, 1)) for n in range(40)]
    assert all(isinstance(outcome, Refused) for outcome in await asyncio.gather(*waiting))
    assert seats.MOST_WAITING < 40 and limiter._seats._waiting == {}


async def test_a_client_that_leaves_while_it_waits_for_a_seat_takes_none(store: Store) -> None:
    limiter, key = Limiter(store.database, "g1", seat_seconds=60.0), with_limits(concurrent=1)
    await limiter.admit("r1", key, DEFAULT, 1)
    gone = asyncio.ensure_future(limiter.admit("r2", key, DEFAULT, 1))
    await limiter.ended(["nobody"])
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await limiter.ended(["r1"])
    assert isinstance(await limiter.admit("r3", key, DEFAULT, 1), Admitted)


async def test_a_client_that_leaves_when_it_is_let_in_takes_no_seat(store: Store) -> None:
    limiter, key = Limiter(store.database, "g1"), with_limits(concurrent=1)
    entering = asyncio.ensure_future(limiter.admit("r1", key, DEFAULT, 1))
    await asyncio.sleep(0)
    (_, decided), *_ = limiter._admit._waiting
    while not decided.done():
        await asyncio.sleep(0)
    entering.cancel()  # before it has heard of the decision
    await asyncio.gather(entering, return_exceptions=True)
    assert entering.cancelled()
    await asyncio.gather(*limiter._releases)
    assert isinstance(await limiter.admit("r2", key, DEFAULT, 1), Admitted)


async def test_what_a_request_left_to_do_keeps_its_seat_when_the_request_ends(store: Store) -> None:
    key = with_limits(concurrent=1, requests_per_minute=2, tokens_per_minute=1000)
    worker = Limiter(store.database, "process-1")
    await store.limiter.admit("r1", key, DEFAULT, 300, now=NOON)
    assert isinstance(await worker.admit("r1", key, DEFAULT, 300, is_deferred=True, now=NOON), Admitted)
    await store.limiter.ended(["r1"], now=NOON)  # Envoy's word comes late
    await store.limiter.release(["r1"], now=NOON)
    refused = await store.limiter.admit("r2", key, DEFAULT, 1, now=NOON)
    assert isinstance(refused, Refused) and refused.kind == "concurrent"
    await worker.ended(["r1"], now=NOON)
    assert isinstance(await store.limiter.admit("r2", key, DEFAULT, 1, now=NOON), Admitted)
    await store.limiter.release(["r2"], now=NOON)
    # A second run is no further request, but needs room.
    assert isinstance(await worker.admit("r1", key, DEFAULT, 300, is_deferred=True, now=NOON), Admitted)
    assert isinstance(await store.limiter.admit("r3", key, DEFAULT, 1, now=NOON), Refused)
    await worker.ended(["r1"], now=NOON)
    await store.ledger.settle([record(prompt=10, completion=5)])
    assert await store.remaining(key) == 985


async def test_seats_of_a_dead_gateway_come_back_and_those_of_living_ones_stay(store: Store) -> None:
    key, now = with_limits(concurrent=1), [0.0]
    dead, living = Limiter(store.database, "dead"), Limiter(store.database, "living")
    other = replace(with_limits(concurrent=1), id="key-2")
    await dead.admit("r1", key, DEFAULT, 1)
    await living.admit("r2", other, DEFAULT, 1)
    await Holders(store.database, ["dead"]).beat()
    watcher = Holders(store.database, ["me"], clock=lambda: now[0])
    alive = Holders(store.database, ["living"])
    for now[0] in (0.0, 15.0, 29.0):
        await alive.beat()
        assert await watcher.beat() == []
    now[0] = DEAD_SECONDS
    await alive.beat()
    assert await watcher.beat() == ["dead"]
    assert await store.limiter.expire(math.inf, gateway="dead") == 1
    await watcher.forget("dead")
    assert await watcher.beat() == []
    assert isinstance(await store.limiter.admit("r3", key, DEFAULT, 1), Admitted)
    assert isinstance(await store.limiter.admit("r4", other, DEFAULT, 1), Refused)


async def test_gateways_that_had_no_database_find_each_other_alive(store: Store) -> None:
    now = [0.0]
    alive = Holders(store.database, ["living"])
    watcher = Holders(store.database, ["me"], clock=lambda: now[0])
    await alive.beat()
    for now[0] in (0.0, 5.0, 5.0 + 2 * DEAD_SECONDS):  # the database was away
        assert await watcher.beat() == []
    await alive.beat()
    now[0] += DEAD_SECONDS / 3
    assert await watcher.beat() == []
    for _ in range(3):  # now it is the other gateway that is away
        now[0] += DEAD_SECONDS / 3
        dead = await watcher.beat()
    assert dead == ["living"]


async def test_seats_of_a_gateway_that_never_beat_come_back_too(store: Store) -> None:
    now = [0.0]
    await Limiter(store.database, "of an earlier version").admit("r1", with_limits(concurrent=1), DEFAULT, 1)
    watcher = Holders(store.database, ["me"], clock=lambda: now[0])
    for now[0] in (0.0, DEAD_SECONDS / 2):
        assert await watcher.beat() == []
    now[0] = DEAD_SECONDS
    assert await watcher.beat() == ["of an earlier version"]
