"""Connects to SQLite and PostgreSQL, and hides what differs between them."""

from __future__ import annotations

import functools
import logging
import os
import socket
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_vllm.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)
Row = tuple[Any, ...]
BUSY_SECONDS = 10.0
"""How long to wait for another process that writes."""
STATEMENT_SECONDS = 10.0
"""How long PostgreSQL may take for one statement."""
HANG_SECONDS = 15.0
"""When a connection is cut whose server does not even say that a statement took too long."""
_EXCLUSIVE_LOCK = 0x6479766D
"""PostgreSQL's number of the lock that `exclusive` work of all gateways takes."""
_POSTGRES_TIMEOUTS = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": int(HANG_SECONDS * 1000),
}
"""Unless the address names others."""
_TOO_LONG, _NO_RESOURCES = "57014", "53"
"""PostgreSQL's code of a statement that took too long, and the class of those of a full disk."""
SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")


class Transaction(Protocol):
    """What a piece of work may do."""

    def now(self) -> float:
        """Return seconds since 1970, by the clock that all gateways of this database share."""

    def all(self, sql: str, *values: object) -> list[Row]:
        """Return all rows."""

    def one(self, sql: str, *values: object) -> Row | None:
        """Return the first row, if there is one."""

    def execute(self, sql: str, *values: object) -> int:
        """Return the number of rows that it changed."""

    def many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        """Run a statement once for each row of values; on PostgreSQL all of them in one round trip."""


def shared_clock(t: Transaction) -> float:
    """Return the time for rows that gateways compare with those of others."""
    return t.now()


class Connection(Protocol):
    """A connection to one of the databases."""

    @property
    def transaction(self) -> Transaction: ...

    def begin(self, *, exclusive: bool) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def is_lost(self, exc: Exception) -> bool:
        """Return whether the work may succeed on another connection."""

    def limit_time(self) -> None:
        """Let the server end statements that take too long, from now on."""

    def cut(self) -> None:
        """Make a wait for the server fail, from another thread."""

    def close(self) -> None: ...


def connect(url: str) -> Connection:
    """Open a connection; an address of another kind is refused."""
    if url.startswith(SQLITE):
        return _SQLiteConnection(Path(url.removeprefix(SQLITE)))
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
            _close_to_others(path)
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

    def limit_time(self) -> None:
        """A file has its limit from the start: `BUSY_SECONDS`."""

    def cut(self) -> None:
        """Nobody answers for a file."""

    def close(self) -> None:
        self._connection.close()


def _close_to_others(path: Path) -> None:
    """Take the rights of other users from a database that has them; its log takes those of the database."""
    for name in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
        with suppress(FileNotFoundError):
            about = name.stat()
            if about.st_uid == os.geteuid() and about.st_mode & 0o077:
                logger.warning("%s was open to other users of this machine; its mode is 0600 now", name)
                name.chmod(0o600)


class _SQLiteTransaction:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def now(self) -> float:
        return time.time()

    def all(self, sql: str, *values: object) -> list[Row]:
        return self._connection.execute(sql, values).fetchall()

    def one(self, sql: str, *values: object) -> Row | None:
        row: Row | None = self._connection.execute(sql, values).fetchone()
        return row

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
            settings: dict[str, Any] = {**_POSTGRES_TIMEOUTS, **psycopg.conninfo.conninfo_to_dict(url)}
            self._connection = psycopg.connect(**settings, autocommit=True)
            # A plan that was made while a table was small reads all of it until the next ANALYZE.
            self._connection.execute("SET enable_seqscan = off")
        except psycopg.Error as exc:
            raise StartError(
                f"the database {without_password(url)} cannot be reached: {str(exc).strip()}"
            ) from exc
        self.transaction = _PostgresTransaction(self._connection)

    def begin(self, *, exclusive: bool) -> None:
        lock = f"; SELECT pg_advisory_xact_lock({_EXCLUSIVE_LOCK})" if exclusive else ""
        try:
            cursor = self._connection.execute(f"BEGIN{lock}; SELECT EXTRACT(EPOCH FROM clock_timestamp())")
        except self._errors as exc:
            if exc.sqlstate == _TOO_LONG:
                raise StartError("another gateway keeps the database locked") from exc
            raise
        while cursor.nextset():
            pass
        (began,) = cursor.fetchone() or (time.time(),)
        self.transaction.began = float(began)

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        self._connection.execute("ROLLBACK")

    def is_lost(self, exc: Exception) -> bool:
        """A lost connection, a server that is away (`StartError`), or a deadlock.

        With a full disk, or for a statement that takes too long, another connection changes nothing.
        """
        code = getattr(exc, "sqlstate", None) or ""
        return isinstance(exc, (*self._errors, StartError)) and not code.startswith(
            (_TOO_LONG, _NO_RESOURCES)
        )

    def limit_time(self) -> None:
        """A gateway that stops in the middle of a transaction must not hold the lock of all others either."""
        self._connection.execute(
            f"SET statement_timeout = {int(STATEMENT_SECONDS * 1000)};"
            f" SET idle_in_transaction_session_timeout = {int(HANG_SECONDS * 1000)}"
        )

    def cut(self) -> None:
        with suppress(Exception), socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


class _PostgresTransaction:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.began = 0.0

    def now(self) -> float:
        """Return the server's time at the begin of this transaction."""
        return self.began

    def all(self, sql: str, *values: object) -> list[Row]:
        rows: list[Row] = self._cursor(sql, values).fetchall()
        return rows

    def one(self, sql: str, *values: object) -> Row | None:
        row: Row | None = self._cursor(sql, values).fetchone()
        return row

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
