"""Keeps what the gateway must not forget: in SQLite on one machine, in PostgreSQL for several gateways.

One thread does all work of a process, in the order in which it was asked for. What waits together becomes one
transaction, so that many small writes cost one commit. The SQL is what both databases understand, with `?`
for a value; times are seconds since 1970, so that no clock but the gateway's counts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import queue
import sqlite3
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dynamo_vllm.config import folders
from dynamo_vllm.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Work = Callable[["Transaction"], Any]
    Item = tuple[Work, Future[Any], bool]

logger = logging.getLogger(__name__)
T = TypeVar("T")
Row = tuple[Any, ...]
MOST_TOGETHER = 256
"""Works in one transaction."""
BUSY_SECONDS = 10.0
"""How long to wait for another process that writes."""
RECONNECT_SECONDS = 20.0
"""How long work waits for a PostgreSQL server that is away."""
_EXCLUSIVE_LOCK = 0x6479766D
"""PostgreSQL's number of the lock that `exclusive` work of all gateways takes."""
_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")


class Transaction(Protocol):
    """What a piece of work may do."""

    def all(self, sql: str, *values: object) -> list[Row]:
        """Return all rows."""

    def one(self, sql: str, *values: object) -> Row | None:
        """Return the first row, if there is one."""

    def execute(self, sql: str, *values: object) -> int:
        """Return the number of rows that it changed."""

    def many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        """Run a statement once for each row of values; on PostgreSQL all of them in one round trip."""


class Connection(Protocol):
    """A connection to one of the databases."""

    @property
    def transaction(self) -> Transaction: ...

    def begin(self, *, exclusive: bool) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def is_lost(self, exc: Exception) -> bool:
        """Return whether the work may succeed on another connection."""

    def close(self) -> None: ...


class Database:
    """Runs work in transactions, from any thread or event loop."""

    def __init__(self, url: str, schema: Sequence[str] = ()) -> None:
        self._url = url
        self._line: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._connection = connect(url)
        with suppress(Exception):  # two processes may create the tables at the same time
            self._once([lambda t: [t.execute(statement) for statement in schema]], True)
        self._once([lambda t: [t.execute(statement) for statement in schema]], True)
        self._thread = threading.Thread(target=self._run, daemon=True, name="database")
        self._thread.start()

    async def run(self, work: Callable[[Transaction], T], *, exclusive: bool = False) -> T:
        """Return the result of the work, once it is committed. It may be run again if something else failed.

        No other exclusive work of any gateway runs at the same time. It may read rows, compute and write them
        back; the rows that two transactions lock in another order cannot be a deadlock.
        """
        return await asyncio.wrap_future(self._submit(work, exclusive))

    def run_now(self, work: Callable[[Transaction], T], *, exclusive: bool = False) -> T:
        """The same without an event loop."""
        return self._submit(work, exclusive).result()

    def close(self) -> None:
        """Finish what was asked for."""
        self._line.put(None)
        self._thread.join()
        self._connection.close()

    def _submit(self, work: Callable[[Transaction], T], exclusive: bool) -> Future[T]:
        future: Future[T] = Future()
        self._line.put((work, future, exclusive))
        return future

    def _run(self) -> None:
        while (first := self._line.get()) is not None:
            together = [first]
            is_last = False
            while len(together) < MOST_TOGETHER and not is_last:
                try:
                    item = self._line.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    is_last = True
                else:
                    together.append(item)
            self._do(together)
            if is_last:
                return

    def _do(self, together: list[Item]) -> None:
        try:
            results = self._until_connected(
                [work for work, _, _ in together], any(exclusive for _, _, exclusive in together)
            )
        except Exception as exc:
            if len(together) == 1:
                together[0][1].set_exception(exc)
                return
            for item in together:  # one of them is wrong, the others are not
                self._do([item])
            return
        for (_, future, _), result in zip(together, results, strict=True):
            future.set_result(result)

    def _until_connected(self, works: list[Work], exclusive: bool) -> list[Any]:
        deadline = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                return self._once(works, exclusive)
            except Exception as exc:
                if not self._connection.is_lost(exc) or time.monotonic() > deadline:
                    raise
                logger.warning("the database is away, trying again: %s", str(exc).strip())
                time.sleep(0.2)  # in the database's own thread
                with suppress(Exception):
                    self._connection.close()
                    self._connection = connect(self._url)

    def _once(self, works: list[Work], exclusive: bool) -> list[Any]:
        connection = self._connection
        # The lock comes before all rows: works of a group lock theirs in an order that nobody knows.
        connection.begin(exclusive=exclusive)
        try:
            results = [work(connection.transaction) for work in works]
            connection.commit()
        except BaseException:
            with suppress(Exception):
                connection.rollback()
            raise
        return results


def default_url(environment: Mapping[str, str]) -> str:
    """Return the address of the database in this user's data folder."""
    return f"{_SQLITE}{folders.data(environment) / 'gateway.db'}"


def connect(url: str) -> Connection:
    """Open a connection; an address of another kind is refused."""
    if url.startswith(_SQLITE):
        return _SQLiteConnection(Path(url.removeprefix(_SQLITE)))
    if url.startswith(_POSTGRES):
        return _PostgresConnection(url)
    raise ConfigError(
        f"--database {without_password(url)!r} is not an address; use sqlite:///FILE or postgresql://USER@HOST/NAME"
    )


def without_password(url: str) -> str:
    """Return an address for messages."""
    scheme, has_scheme, rest = url.partition("://")
    user, has_user, host = rest.rpartition("@")
    return f"{scheme}{has_scheme}{user.partition(':')[0]}{has_user}{host}" if has_scheme else url


class _SQLiteConnection:
    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            # A killed process loses nothing; a machine without power may lose the last moments.
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
        except (OSError, sqlite3.Error) as exc:
            raise StartError(f"the database {path} cannot be opened: {exc}") from exc
        self.transaction = _SQLiteTransaction(self._connection)

    def begin(self, *, exclusive: bool) -> None:
        """All transactions are exclusive here."""
        self._connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        self._connection.execute("ROLLBACK")

    def is_lost(self, exc: Exception) -> bool:
        return isinstance(exc, sqlite3.OperationalError) and "locked" in str(exc)

    def close(self) -> None:
        self._connection.close()


class _SQLiteTransaction:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def all(self, sql: str, *values: object) -> list[Row]:
        return self._connection.execute(sql, values).fetchall()

    def one(self, sql: str, *values: object) -> Row | None:
        found: Row | None = self._connection.execute(sql, values).fetchone()
        return found

    def execute(self, sql: str, *values: object) -> int:
        return self._connection.execute(sql, values).rowcount

    def many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        self._connection.executemany(sql, rows)


class _PostgresConnection:
    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise ConfigError(
                "--database postgresql://… needs psycopg; install it: pip install 'dynamo-vllm[postgres]'"
            ) from None
        self._errors = (psycopg.OperationalError, psycopg.InterfaceError)
        try:
            self._connection = psycopg.connect(url, autocommit=True, connect_timeout=5)
            # A plan that was made while a table was small reads all of it until the next ANALYZE.
            self._connection.execute("SET enable_seqscan = off")
        except psycopg.Error as exc:
            raise StartError(
                f"the database {without_password(url)} cannot be reached: {str(exc).strip()}"
            ) from exc
        self.transaction = _PostgresTransaction(self._connection)

    def begin(self, *, exclusive: bool) -> None:
        lock = f"; SELECT pg_advisory_xact_lock({_EXCLUSIVE_LOCK})" if exclusive else ""
        self._connection.execute("BEGIN" + lock)

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        self._connection.execute("ROLLBACK")

    def is_lost(self, exc: Exception) -> bool:
        """A lost connection, a server that is away (`StartError`), or a deadlock."""
        return isinstance(exc, (*self._errors, StartError))

    def close(self) -> None:
        self._connection.close()


class _PostgresTransaction:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def all(self, sql: str, *values: object) -> list[Row]:
        found: list[Row] = self._cursor(sql, values).fetchall()
        return found

    def one(self, sql: str, *values: object) -> Row | None:
        found: Row | None = self._cursor(sql, values).fetchone()
        return found

    def execute(self, sql: str, *values: object) -> int:
        count: int = self._cursor(sql, values).rowcount
        return count

    def many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        if len(rows) == 1:  # a pipeline takes longer
            self._cursor(sql, rows[0])
            return
        with self._connection.cursor() as cursor:
            cursor.executemany(_with_percents(sql), rows)

    def _cursor(self, sql: str, values: Sequence[object]) -> Any:
        return self._connection.execute(_with_percents(sql), values)


@functools.lru_cache(1024)
def _with_percents(sql: str) -> str:
    """Return SQL with psycopg's mark for a value."""
    return sql.replace("%", "%%").replace("?", "%s")
