"""Odd bodies, ids and queries: each is refused, none is a fault of the gateway."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from harness.responses_app import PATH, App, app

DEEP = b"[" * 200_000 + b"]" * 200_000
HUGE = b"1" + b"0" * 400
VALUES = (
    *(b"null", b"5", HUGE, b"18446744073709551617", b"1e999", b'"\\u0000"', b'"\\ud800"', b'"\xff"'),
    *(b'"' + b"x" * 100_000 + b'"', b"{}", b"[[]]", DEEP),
)
FIELDS = (
    *(b"input", b"store", b"stream", b"background", b"previous_response_id", b"conversation"),
    *(b"metadata", b"instructions", b"max_output_tokens"),
)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[App]:
    async with app(tmp_path, background_concurrency=0) as running:
        yield running


async def assert_answered(gateway: App, path: str, body: bytes, *statuses: int) -> httpx.Response:
    answer = await gateway.send("POST", path, content=body)
    assert answer.status_code in statuses, (path, body[:100], answer.text[:200])
    return answer


async def test_fields_with_odd_values(gateway: App) -> None:
    for field, value in itertools.product(FIELDS, VALUES):
        for mode in (b"", b'"background":true,', b'"store":false,'):
            body = b'{"model":"m","input":"hi",%s"%s":%s}' % (mode, field, value)
            await assert_answered(gateway, PATH, body, 200, 400, 413)
        await assert_answered(gateway, f"{PATH}/input_tokens", body, 200, 400, 413)


async def test_items_with_odd_values(gateway: App) -> None:
    kinds, fields = (b"message", b"item_reference"), (b"id", b"type", b"content", b"role")
    modes = (b"", b',"background":true')
    for kind, field, value, mode in itertools.product(kinds, fields, VALUES, modes):
        body = b'{"input":[{"type":"%s","%s":%s}]%s}' % (kind, field, value, mode)
        answer = await assert_answered(gateway, PATH, body, 200, 400, 404)
        if answer.status_code == 200:
            listed = await gateway.send("GET", f"{PATH}/{answer.json()['id']}/input_items")
            assert listed.status_code == 200, body[:100]


async def test_odd_bodies(gateway: App) -> None:
    for body in (
        *(b"", b"[]", b"null", b"{", b"\xef\xbb\xbf{}", b"\x00", b'{"input":"\x00"}'),
        *(b'{"input":"\xff"}', b'{"\xff":1,"input":"x"}', b'{"input":"x"}{"input":"x"}', DEEP, HUGE),
    ):
        for path in (PATH, f"{PATH}/input_tokens"):
            await assert_answered(gateway, path, body, 400)


async def test_odd_ids(gateway: App) -> None:
    names = ("%00", "a%00b", "%ff", "%ed%a0%80", "x" * 10_000, "%F0%9F%98%80")
    requests = (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))
    for name, (method, path) in itertools.product(names, requests):
        answer = await gateway.send(method, f"{PATH}/{name}{path}")
        assert answer.status_code == 404, (method, name, path, answer.text[:200])


async def test_odd_queries(gateway: App) -> None:
    name = (await gateway.create("hello")).json()["id"]
    for query in (
        *("limit=0", "limit=101", "limit=-1", "limit=1.5", "limit=nan", "limit=\u0665", "limit="),
        *("limit=%00", "limit=1e1", "limit=" + "9" * 400, "after=%00", "after=nobody", "after=" + "x" * 999),
        *("order=up", "order=%00", "order="),
    ):
        answer = await gateway.send("GET", f"{PATH}/{name}/input_items?{query}")
        assert answer.status_code == 400, (query, answer.text)


async def test_item_id_that_no_database_takes_is_refused_with_its_length(gateway: App) -> None:
    for name in ("x" * 257, "a\0b"):
        answer = await gateway.create([{"type": "message", "role": "user", "content": "x", "id": name}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        assert str(len(name)) in answer.json()["error"]["message"]
    assert gateway.frontend.requests == []
