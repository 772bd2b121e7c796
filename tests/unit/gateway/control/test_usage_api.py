"""/v1/usage: what each tenant may read, how much of it, and odd questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from dynamo_vllm.gateway import identity, schema
from dynamo_vllm.gateway.control import usage_api
from dynamo_vllm.gateway.database import Database, Transaction
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store import usage

DAYS = range(20_000, 20_035)
SPAN = {"since": str(DAYS[0] * 86400), "until": str((DAYS[-1] + 1) * 86400)}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path / 'gateway.db'}", schema.ALL)
    rows = [
        (day, f"key-{tenant}-{number}", tenant, "m", 1, 10, 0, 5)
        for day in DAYS
        for tenant in ("a", "b", "c")
        for number in range(3)
    ]
    opened.run_now(lambda t: t.many("INSERT INTO gateway_usage VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows))
    yield opened
    opened.close()


def refused(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, GatewayError)
    return Response(exc.body(), exc.status)


async def ask(database: Database, query: dict[str, str], *, is_admin: bool = False) -> httpx.Response:
    app = Starlette(routes=usage_api.routes(database), exception_handlers={GatewayError: refused})
    headers = {identity.TENANT: "a", **({identity.ADMIN: "1"} if is_admin else {})}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://g", headers=headers) as client:
        return await client.get("/v1/usage", params=query)


class Explained:
    """Notes which rows of the tables the database looks at for each question."""

    def __init__(self, t: Transaction) -> None:
        self._t = t
        self.plan: list[str] = []

    def all(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        self.plan += [str(row[-1]) for row in self._t.all(f"EXPLAIN QUERY PLAN {sql}", *values)]
        return self._t.all(sql, *values)


def test_only_the_rows_of_the_tenant_are_read(database: Database) -> None:
    def work(t: Transaction) -> list[str]:
        explained: Any = Explained(t)
        summed = usage.usage(0, 1e11, ("day", "tenant"), tenant="a", limit=1000)(explained)
        assert len(summed) == len(DAYS) and {group.tenant for group in summed} == {"a"}
        return list(explained.plan)

    plan = database.run_now(work)
    assert any("gateway_usage_tenant (tenant=? AND day>? AND day<?)" in step for step in plan), plan
    assert not any(step.startswith("SCAN") for step in plan), plan


async def test_tenant_reads_its_own_usage_and_an_admin_that_of_all(database: Database) -> None:
    own = (await ask(database, {**SPAN, "by": "key"})).json()
    assert own["object"] == "list" and own["has_more"] is False
    assert {group["tenant"] for group in own["data"]} == {"a"} and len(own["data"]) == 3
    assert own["data"][0] == {
        **{"object": "usage", "tenant": "a", "key": "key-a-0", "requests": len(DAYS)},
        **{"prompt_tokens": 10 * len(DAYS), "cached_tokens": 0},
        **{"completion_tokens": 5 * len(DAYS), "total_tokens": 15 * len(DAYS)},
    }
    every = (await ask(database, {**SPAN, "by": "tenant"}, is_admin=True)).json()
    assert [group["tenant"] for group in every["data"]] == ["a", "b", "c"]


async def test_long_answer_is_cut_and_says_so(database: Database) -> None:
    cut = (await ask(database, {**SPAN, "by": "day,key", "limit": "10"})).json()
    assert len(cut["data"]) == 10 and cut["has_more"] is True
    assert cut["data"][0]["day"] == "2024-10-04"
    whole = (await ask(database, {**SPAN, "by": "day,key", "limit": "105"})).json()
    assert len(whole["data"]) == 105 and whole["has_more"] is False


@pytest.mark.parametrize("name", ["since", "until"])
@pytest.mark.parametrize(
    "text",
    [
        *("9" * 400, "1" + "0" * 12, "1e999", "inf", "nan", "-1", "1000000000-01-01", "10000-01-01", ""),
        *(
            "\u0661\u0662",
            "\uff12\uff10\uff12\uff16-01-01",
            "1.2.3",
            ".",
            "0001-01-01",
            "2026-02-30",
            "x" * 5000,
        ),
        *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "\x00", "2026-01-01\n"),
    ],
)
async def test_moment_that_is_none_is_refused(database: Database, name: str, text: str) -> None:
    answer = await ask(database, {name: text})
    assert answer.status_code == 400, answer.text
    assert json.loads(answer.content)["error"]["param"] == name and len(answer.content) < 500


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("0", 0), ("86400.5", 86400.5), ("2026-01-31", 1769817600), ("2026-01-31T12:00:00", 1769860800)),
        ("2026-01-31T12:00:00+02:00", 1769853600),
    ],
)
def test_day_or_seconds_are_a_moment(text: str, seconds: float) -> None:
    assert usage_api.moment(text, "since", 5.0) == seconds


@pytest.mark.parametrize("by", ["", "nothing", "day,", ",".join(["day"] * 9), "x" * 5000, "d\u0430y"])
async def test_groups_that_are_none_are_refused(database: Database, by: str) -> None:
    answer = await ask(database, {"by": by})
    assert answer.status_code == 400 and len(answer.content) < 500
    assert answer.json()["error"]["param"] == "by"


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "9" * 400, "1.5", "nan", "\u0661", ""])
async def test_limit_outside_its_range_is_refused(database: Database, limit: str) -> None:
    answer = await ask(database, {"limit": limit})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
