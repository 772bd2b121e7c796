"""/v1/usage: what each tenant may read, how much of it, and odd questions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.control import usage_api
from dynamo_vllm.gateway.database import Database, Transaction
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store import usage

DAYS = range(20_000, 20_035)
SPAN = {"since": str(DAYS[0] * 86400), "until": str((DAYS[-1] + 1) * 86400)}


@pytest.fixture
def filled(database: Database) -> Database:
    """35 days of three keys of each of three tenants."""
    keys = [(f"key-{tenant}-{number}", tenant) for tenant in "abc" for number in range(3)]
    rows = [(day, *key, "m", 1, 10, 0, 5) for day in DAYS for key in keys]
    database.run_now(lambda t: t.many("INSERT INTO gateway_usage VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows))
    return database


def refused(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, GatewayError)
    return Response(exc.body(), exc.status)


async def ask(database: Database, query: dict[str, str], *, is_admin: bool = False) -> httpx.Response:
    app = Starlette(routes=usage_api.routes(database), exception_handlers={GatewayError: refused})
    headers = {identity.TENANT: "a", **({identity.ADMIN: "1"} if is_admin else {})}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://g", headers=headers) as client:
        return await client.get("/v1/usage", params=query)


async def assert_refused(database: Database, name: str, texts: Iterable[str]) -> None:
    for text in texts:
        answer = await ask(database, {name: text})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), text
        assert len(answer.content) < 500


class Explained:
    """Notes which rows of the tables the database looks at for each question."""

    def __init__(self, t: Transaction) -> None:
        self._t = t
        self.plan: list[str] = []

    def all(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        self.plan += [str(row[-1]) for row in self._t.all(f"EXPLAIN QUERY PLAN {sql}", *values)]
        return self._t.all(sql, *values)


def test_only_the_rows_of_the_tenant_are_read(filled: Database) -> None:
    def work(t: Transaction) -> list[str]:
        explained: Any = Explained(t)
        summed = usage.usage(0, 1e11, ("day", "tenant"), tenant="a", limit=1000)(explained)
        assert len(summed) == len(DAYS) and {group.tenant for group in summed} == {"a"}
        return list(explained.plan)

    plan = filled.run_now(work)
    assert any("gateway_usage_tenant (tenant=? AND day>? AND day<?)" in step for step in plan), plan
    assert not any(step.startswith("SCAN") for step in plan), plan


async def test_tenant_reads_its_own_usage_and_an_admin_that_of_all(filled: Database) -> None:
    own = (await ask(filled, {**SPAN, "by": "key"})).json()
    assert own["object"] == "list" and own["has_more"] is False
    assert {group["tenant"] for group in own["data"]} == {"a"} and len(own["data"]) == 3
    assert own["data"][0] == {
        **{"object": "usage", "tenant": "a", "key": "key-a-0", "requests": len(DAYS)},
        **{"prompt_tokens": 10 * len(DAYS), "cached_tokens": 0},
        **{"completion_tokens": 5 * len(DAYS), "total_tokens": 15 * len(DAYS)},
    }
    every = (await ask(filled, {**SPAN, "by": "tenant"}, is_admin=True)).json()
    assert [group["tenant"] for group in every["data"]] == ["a", "b", "c"]


async def test_long_answer_is_cut_and_says_so(filled: Database) -> None:
    cut = (await ask(filled, {**SPAN, "by": "day,key", "limit": "10"})).json()
    assert len(cut["data"]) == 10 and cut["has_more"] is True
    assert cut["data"][0]["day"] == "2024-10-04"
    whole = (await ask(filled, {**SPAN, "by": "day,key", "limit": "105"})).json()
    assert len(whole["data"]) == 105 and whole["has_more"] is False


async def test_moment_that_is_none_is_refused(database: Database) -> None:
    odd = (
        *("9" * 400, "1" + "0" * 12, "1e999", "inf", "nan", "-1", "1000000000-01-01", "10000-01-01", ""),
        *("\u0661\u0662", "\uff12\uff10\uff12\uff16-01-01", "1.2.3", ".", "0001-01-01", "2026-02-30"),
        *("x" * 5000, "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "\x00", "2026-01-01\n"),
    )
    for name in ("since", "until"):
        await assert_refused(database, name, odd)


def test_day_or_seconds_are_a_moment() -> None:
    for text, seconds in {
        "0": 0,
        "86400.5": 86400.5,
        "2026-01-31": 1769817600,
        "2026-01-31T12:00:00": 1769860800,
        "2026-01-31T12:00:00+02:00": 1769853600,
    }.items():
        assert usage_api.moment(text, "since", 5.0) == seconds, text


async def test_groups_and_limits_that_are_none_are_refused(database: Database) -> None:
    groups = ("", "nothing", "day,", ",".join(["day"] * 9), "x" * 5000, "d\u0430y")
    await assert_refused(database, "by", groups)
    limits = ("0", "-1", "10001", "9" * 400, "1.5", "nan", "\u0661", "")
    await assert_refused(database, "limit", limits)
