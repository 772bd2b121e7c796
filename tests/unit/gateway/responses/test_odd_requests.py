"""Odd bodies, ids and queries: each is refused, none is a fault of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.responses_app import PATH, App, app

DEEP = b"[" * 200_000 + b"]" * 200_000
HUGE = b"1" + b"0" * 400
VALUES = {
    "null": b"null",
    "number": b"5",
    "huge number": HUGE,
    "beyond 64 bits": b"18446744073709551617",
    "not finite": b"1e999",
    "NUL": b'"\\u0000"',
    "lone surrogate": b'"\\ud800"',
    "not UTF-8": b'"\xff"',
    "long text": b'"' + b"x" * 100_000 + b'"',
    "object": b"{}",
    "list": b"[[]]",
    "nested": DEEP,
}
FIELDS = (
    "input",
    "store",
    "stream",
    "background",
    "previous_response_id",
    "conversation",
    "metadata",
    "instructions",
    "max_output_tokens",
)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[App]:
    async with app(tmp_path, background_concurrency=0) as running:
        yield running


def body_with(field: str, value: bytes, mode: bytes) -> bytes:
    return b'{"model":"m","input":"hi",%s"%s":%s}' % (mode, field.encode(), value)


@pytest.mark.parametrize("value", VALUES)
async def test_fields_with_odd_values(gateway: App, value: str) -> None:
    for field in FIELDS:
        for mode in (b"", b'"background":true,', b'"store":false,'):
            for path in (PATH, f"{PATH}/input_tokens"):
                body = body_with(field, VALUES[value], mode)
                answer = await gateway.send("POST", path, content=body)
                assert answer.status_code in (200, 400, 413), (field, mode, path, answer.text[:200])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("field", ["id", "type", "content", "role"])
async def test_items_with_odd_values(gateway: App, value: str, field: str) -> None:
    for kind in (b"message", b"item_reference"):
        item = b'{"type":"%s","%s":%s}' % (kind, field.encode(), VALUES[value])
        for mode in (b"", b',"background":true'):
            body = b'{"input":[%s]%s}' % (item, mode)
            answer = await gateway.send("POST", PATH, content=body)
            assert answer.status_code in (200, 400, 404), (kind, answer.text[:200])
            if answer.status_code == 200:
                listed = await gateway.send("GET", f"{PATH}/{answer.json()['id']}/input_items")
                assert listed.status_code == 200


BODIES = [
    *(b"", b"[]", b"null", b"{", b"\xef\xbb\xbf{}", b"\x00", b'{"input":"\x00"}'),
    *(b'{"input":"\xff"}', b'{"\xff":1,"input":"x"}', b'{"input":"x"}{"input":"x"}', DEEP, HUGE),
]


@pytest.mark.parametrize("number", range(len(BODIES)))
async def test_odd_bodies(gateway: App, number: int) -> None:
    for path in (PATH, f"{PATH}/input_tokens"):
        answer = await gateway.send("POST", path, content=BODIES[number])
        assert answer.status_code == 400, (BODIES[number][:20], answer.text[:200])


@pytest.mark.parametrize("name", ["%00", "a%00b", "%ff", "%ed%a0%80", "x" * 10_000, "%F0%9F%98%80"])
async def test_odd_ids(gateway: App, name: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = await gateway.send(method, f"{PATH}/{name}{path}")
        assert answer.status_code == 404, (method, path, answer.text[:200])


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=101", "limit=-1", "limit=1.5", "limit=nan", "limit=\u0665", "limit="),
        *("limit=%00", "limit=1e1", "limit=" + "9" * 400, "after=%00", "after=nobody", "after=" + "x" * 999),
        *("order=up", "order=%00", "order="),
    ],
)
async def test_odd_queries(gateway: App, query: str) -> None:
    name = (await gateway.create("hello")).json()["id"]
    answer = await gateway.send("GET", f"{PATH}/{name}/input_items?{query}")
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("name", ["x" * 257, "a\0b"])
async def test_item_id_that_no_database_takes_is_refused_with_its_length(gateway: App, name: str) -> None:
    item = {"type": "message", "role": "user", "content": "x", "id": name}
    answer = await gateway.create([item])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert str(len(name)) in answer.json()["error"]["message"]
    assert gateway.frontend.requests == []
