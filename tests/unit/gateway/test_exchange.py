"""What clients are told when storage fails, a body is too long, or an error has to be theirs to read."""

from __future__ import annotations

import errno
import json
import logging
import sqlite3
from typing import Any

import psycopg
import pytest
from starlette.requests import Request
from starlette.responses import Response

from dynamo_vllm.gateway.database import DatabaseAway
from dynamo_vllm.gateway.exchange import answered, is_utf8, read_body, storage_refusal
from dynamo_vllm.gateway.replies import GatewayError
from harness.refusals import refused


async def test_route_that_meets_a_full_disk_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(_: Request) -> Response:
        raise sqlite3.OperationalError("database or disk is full")

    with caplog.at_level(logging.WARNING):
        answers = [await answered(handler)(Request({"type": "http"})) for _ in range(5)]
    assert {answer.status_code for answer in answers} == {507}
    assert b"disk or database is full" in answers[0].body
    assert len(caplog.messages) <= 1


async def test_fault_of_ours_stays_one() -> None:
    async def handler(_: Request) -> Response:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await answered(handler)(Request({"type": "http"}))


def test_utf8_is_known_across_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_vllm.gateway.exchange.PIECE_BYTES", 3)
    assert is_utf8("a€é😀".encode())
    assert not is_utf8("a€é😀".encode()[:-1])
    assert not is_utf8(b"abc\xff")


def test_failing_storage_has_a_status_and_other_faults_have_none() -> None:
    statuses: dict[Exception, int | None] = {
        sqlite3.OperationalError("database or disk is full"): 507,
        sqlite3.OperationalError("disk I/O error"): 503,
        sqlite3.OperationalError("database is locked"): 503,
        OSError(errno.ENOSPC, "No space left on device"): 507,
        DatabaseAway("the database is away"): 503,
        OSError(errno.ECONNRESET, "reset"): None,
        KeyError("a fault of ours"): None,
        psycopg.errors.DiskFull(): 507,
        psycopg.OperationalError(): 503,
        psycopg.DataError(): None,
    }
    refusals = {exc: storage_refusal(exc) for exc in statuses}
    assert {exc: refusal and refusal.status for exc, refusal in refusals.items()} == statuses


async def test_a_body_is_read_to_its_limit_and_a_client_that_leaves_meanwhile_is_no_fault() -> None:
    def request(*parts: bytes | None) -> Request:
        messages = iter(parts)

        async def receive() -> dict[str, Any]:
            body = next(messages)
            if body is None:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": body, "more_body": body != b"c"}

        return Request({"type": "http", "method": "POST", "headers": []}, receive)

    assert await read_body(request(b"ab", b"c"), 3) == b"abc"
    with refused(413):
        await read_body(request(b"ab", b"cd"), 3)
    with refused(499):
        await read_body(request(b"ab", None), 3)


def test_type_of_an_error_is_one_that_the_clients_of_a_path_know() -> None:
    for status, path, kind in (
        (401, "/v1/chat/completions", "invalid_request_error"),
        (401, "/v1/messages", "authentication_error"),
        (403, "/v1/messages/count_tokens", "permission_error"),
        (400, "/v1/messages", "invalid_request_error"),
        (429, "/v1/messages", "rate_limit_error"),
        (504, "/v1/messages", "api_error"),
        (504, "/v1/completions", "server_error"),
    ):
        body = json.loads(GatewayError(status, "why", code="c").body(path))
        error = {"message": "why", "type": kind, "param": None, "code": "c"}
        assert body == {"type": "error", "error": error}, (status, path)
