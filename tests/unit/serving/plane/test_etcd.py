"""Which of etcd's members is asked, over small stand-ins for them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dynamo_vllm.config.planes import EtcdAccess
from dynamo_vllm.serving.plane import etcd_lease
from dynamo_vllm.serving.plane.etcd import Etcd, EtcdError
from harness.waiting import until

WELL = (200, json.dumps({"grantedTTL": "60", "TTL": "59"}).encode())
NO_LEADER = (503, json.dumps({"error": "etcdserver: no leader", "code": 14}).encode())
PROXY = (502, b"<html>bad gateway</html>")
REFUSED = (400, json.dumps({"message": "etcdserver: permission denied", "code": 3}).encode())


class Member:
    """Says the same to everybody."""

    def __init__(self, status: int, content: bytes) -> None:
        self.asked = 0
        member = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                member.asked += 1
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def members(*answers: tuple[int, bytes]) -> Iterator[tuple[Member, ...]]:
    made = tuple(Member(*answer) for answer in answers)
    for member in made:
        threading.Thread(target=member.server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield made
    finally:
        for member in made:
            member.server.shutdown()
            member.server.server_close()


def client(found: tuple[Member, ...]) -> Etcd:
    return Etcd(EtcdAccess(tuple(member.url for member in found)))


@pytest.mark.parametrize("sick", [NO_LEADER, PROXY], ids=["no leader", "proxy"])
async def test_sick_member_is_left_for_the_next(sick: tuple[int, bytes]) -> None:
    with members(sick, WELL) as found:
        async with client(found) as etcd:
            for _ in range(2):
                lease = await etcd.lease(1)
                assert lease is not None and lease.granted_seconds == 60
        assert [member.asked for member in found] == [1, 2], "the one that answered is asked first"


async def test_every_reason_is_told_when_all_are_sick() -> None:
    with members(NO_LEADER, PROXY) as found:
        async with client(found) as etcd:
            with pytest.raises(EtcdError) as failed:
                await etcd.lease(1)
        first, second = found
        assert f"{first.url}: 503 etcdserver: no leader, {second.url}: 502 Bad Gateway" in str(failed.value)


async def test_refusal_holds_for_all_members() -> None:
    with members(REFUSED, WELL) as found:
        async with client(found) as etcd:
            with pytest.raises(EtcdError, match="etcd refused: etcdserver: permission denied"):
                await etcd.lease(1)
        assert [member.asked for member in found] == [1, 0]


ODD_LEASES: list[dict[str, object]] = [
    {"grantedTTL": "soon"},
    {"grantedTTL": None, "TTL": []},
    {"grantedTTL": "60", "keys": [7]},
    {"grantedTTL": "60", "keys": ["abc"]},
    {"grantedTTL": "60", "keys": 5},
]
ODD_KVS = {"response_range": {"kvs": [0]}}
ODD_VALUES: list[dict[str, object]] = [{}, {"responses": [{}]}, {"responses": 1}, {"responses": [ODD_KVS]}]


@pytest.mark.parametrize("odd", ODD_LEASES + ODD_VALUES, ids=str)
async def test_answer_of_another_shape_is_told(odd: dict[str, object]) -> None:
    with members((200, json.dumps(odd).encode())) as found:
        async with client(found) as etcd:
            with pytest.raises(EtcdError, match="etcd sent an unexpected answer"):
                await (etcd.lease(1) if odd in ODD_LEASES else etcd.values([b"key"]))


async def test_keeper_outlives_an_odd_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_lease, "LOOK_SECONDS", 0.01)
    with members((200, json.dumps(ODD_LEASES[0]).encode())) as found:
        keeping = asyncio.create_task(etcd_lease.keep(EtcdAccess((found[0].url,)), None, 1))
        await asyncio.to_thread(until, "several looks", lambda: found[0].asked > 3 or keeping.done())
        assert not keeping.done()
        keeping.cancel()
        await asyncio.wait([keeping])
    (warning,) = [record.message for record in caplog.records if "unexpected answer" in record.message]
    assert "running workers and requests continue" in warning
