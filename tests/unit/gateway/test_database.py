"""The database's thread: whoever leaves, fails or hangs, the work of others goes on."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_vllm.gateway import database as module
from dynamo_vllm.gateway.connections import Transaction
from dynamo_vllm.gateway.database import Database, DatabaseAway

TABLE = ("CREATE TABLE IF NOT EXISTS things (name TEXT)",)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    things = Database(f"sqlite:///{tmp_path}/things.db", TABLE)
    yield things
    things.close()


class Step:
    """Work that stops in the middle until it may go on."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self, t: Transaction) -> str:
        self.began.set()
        assert self.may_end.wait(60)
        t.execute("INSERT INTO things VALUES ('kept')")
        return "done"


async def begun(database: Database) -> tuple[Step, asyncio.Future[str]]:
    """Work that the thread has begun, so that all others wait together."""
    step = Step()
    task = asyncio.ensure_future(database.run(step))
    await asyncio.to_thread(step.began.wait, 60)
    return step, task


async def test_who_leaves_at_any_moment_stops_neither_the_work_nor_the_thread(database: Database) -> None:
    for yields in range(20):
        work = [database.run(lambda t: t.execute("INSERT INTO things VALUES ('kept')")) for _ in range(5)]
        tasks = [asyncio.ensure_future(insertion) for insertion in work]
        for _ in range(yields):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60):
            assert await database.run(lambda t: t.one("SELECT 1")) == (1,)


async def test_work_of_somebody_who_left_is_done(database: Database) -> None:
    step, task = await begun(database)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    step.may_end.set()
    assert await database.run(lambda t: t.all("SELECT name FROM things")) == [("kept",)]


async def test_work_that_fails_fails_alone(database: Database) -> None:
    step, first = await begun(database)
    good = [database.run(lambda t: t.one("SELECT 1")) for _ in range(3)]
    bad = database.run(lambda t: t.execute("INSERT INTO things VALUES (?)", 1 << 70))
    waiting = asyncio.gather(*good, bad, return_exceptions=True)
    await asyncio.sleep(0)
    step.may_end.set()
    results = await waiting
    assert results[:3] == [(1,)] * 3 and isinstance(results[3], OverflowError)
    assert await first == "done"


async def test_a_database_that_is_away_fails_all_that_waits_at_once(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.0)
    monkeypatch.setattr("dynamo_vllm.gateway.connections.BUSY_SECONDS", 0.01)
    database._connection._connection.execute("PRAGMA busy_timeout = 10")  # type: ignore[attr-defined]
    attempts = []

    def work(t: Transaction) -> None:
        attempts.append(1)
        raise sqlite3.OperationalError("database is locked")

    step, first = await begun(database)
    waiting = [asyncio.ensure_future(database.run(work)) for _ in range(50)]
    await asyncio.sleep(0)
    step.may_end.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert await first == "done"
    assert all(isinstance(result, DatabaseAway) for result in results)
    assert len(attempts) <= 3  # not once more for each of them


async def test_a_thread_that_hangs_is_silent_and_one_with_nothing_to_do_is_not(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, task = await begun(database)
    before = database.silent_seconds
    await asyncio.to_thread(time.sleep, 0.05)
    assert database.silent_seconds > before
    step.may_end.set()
    await task
    async with asyncio.timeout(60):
        while database.silent_seconds >= before + 0.05:
            await asyncio.sleep(0.001)


def test_an_error_that_ends_the_thread_ends_the_process(tmp_path: Path) -> None:
    code = f"""
import threading
from dynamo_vllm.gateway.database import Database
database = Database("sqlite:///{tmp_path}/x.db")
def work(t):
    raise SystemExit("nobody expects this")
database._submit(work, False)
threading.Event().wait(60)
print("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 70, done.stdout + done.stderr
    assert "the database's thread ended" in done.stderr


def test_a_database_that_others_can_read_is_closed_to_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "open.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE x (y)")
    connection.commit()
    for name in tmp_path.iterdir():
        name.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        Database(f"sqlite:///{path}", TABLE).close()
    modes = {name.name: name.stat().st_mode & 0o777 for name in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert "was open to other users" in caplog.text
    connection.close()


def test_transaction_that_only_half_begins_hinders_none_after_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = database._connection

    def half(*, exclusive: bool) -> None:
        begin(exclusive=exclusive)
        raise ValueError("the server has no memory for the lock")

    begin = connection.begin
    with monkeypatch.context() as patched:
        patched.setattr(connection, "begin", half)
        with pytest.raises(ValueError, match="no memory"):
            database.run_now(lambda t: None, exclusive=True)
    assert database.run_now(lambda t: t.execute("INSERT INTO things VALUES ('kept')")) == 1
