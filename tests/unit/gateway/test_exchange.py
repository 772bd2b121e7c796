"""What clients are told when the gateway's storage fails."""

from __future__ import annotations

import errno
import logging
import sqlite3

import pytest
from starlette.requests import Request
from starlette.responses import Response

from dynamo_vllm.gateway.database import DatabaseAway
from dynamo_vllm.gateway.exchange import answered, is_utf8, storage_refusal


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


@pytest.mark.parametrize(
    ("exc", "status"),
    [
        (sqlite3.OperationalError("database or disk is full"), 507),
        (sqlite3.OperationalError("disk I/O error"), 503),
        (sqlite3.OperationalError("database is locked"), 503),
        (OSError(errno.ENOSPC, "No space left on device"), 507),
        (DatabaseAway("the database is away"), 503),
        (OSError(errno.ECONNRESET, "reset"), None),
        (KeyError("a fault of ours"), None),
    ],
)
def test_failing_storage_has_a_status_and_other_faults_have_none(exc: Exception, status: int | None) -> None:
    refusal = storage_refusal(exc)
    assert (None if refusal is None else refusal.status) == status


def test_errors_of_postgresql_have_the_same_statuses() -> None:
    psycopg = pytest.importorskip("psycopg")
    full, gone = (storage_refusal(kind()) for kind in (psycopg.errors.DiskFull, psycopg.OperationalError))
    assert full is not None and gone is not None
    assert (full.status, gone.status) == (507, 503)
    assert storage_refusal(psycopg.DataError()) is None
