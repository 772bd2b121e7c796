"""Keeps what the gateway must not forget: in SQLite on one machine, in PostgreSQL for several gateways.

One thread does all work of a process, in the order in which it was submitted. What waits together becomes one
transaction, so that many small writes cost one commit. The SQL is what both databases understand, with `?`
for a value; times are seconds since 1970.

All requests of a gateway depend on this thread. So whoever stops waiting never stops the work, every wait for
a server has a limit, and an error that ends the thread ends the process: its supervisor starts another one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_vllm.config import folders
from dynamo_vllm.gateway.connections import HANG_SECONDS, SQLITE, Row, Transaction, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Work = Callable[[Transaction], Any]
    Item = tuple[Work, Future[Any], bool]

__all__ = ["Database", "DatabaseAway", "Row", "Transaction", "default_url"]
logger = logging.getLogger(__name__)
T = TypeVar("T")
MOST_TOGETHER = 256
"""Works in one transaction."""
RECONNECT_SECONDS = 20.0
"""How long work waits for a PostgreSQL server that is away."""
BEAT_SECONDS = 5.0
"""How often the idle thread shows that it lives."""
_EXIT_CODE = 70


class DatabaseAway(Exception):
    """No work can be done now: the server is away or does not answer, or others keep the file locked."""


class Database:
    """Runs work in transactions, from any thread or event loop."""

    def __init__(self, url: str, schema: Sequence[str] = ()) -> None:
        self._url = url
        self._line: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._connection = connect(url)
        try:
            self._once([lambda t: [t.execute(statement) for statement in schema]], True)
        except Exception:  # two processes may create the tables at the same time
            self._once([lambda t: [t.execute(statement) for statement in schema]], True)
        self._connection.limit_time()
        self._beat = time.monotonic()
        self._busy_since: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="database")
        self._thread.start()
        if not url.startswith(SQLITE):
            threading.Thread(target=self._cut_hanging, daemon=True, name="database-watch").start()

    @property
    def silent_seconds(self) -> float:
        """How long the thread has not shown that it lives; it does so between all its waits."""
        return time.monotonic() - self._beat

    async def run(self, work: Callable[[Transaction], T], *, exclusive: bool = False) -> T:
        """Return the result of the work, once it is committed. It may be run again if something else failed.

        The work is done also if the caller is cancelled meanwhile. No other exclusive work of any gateway
        runs at the same time. It may read rows, compute and write them back; the rows that two transactions
        lock in another order cannot be a deadlock. DatabaseAway says that nothing can be done now.
        """
        return await asyncio.shield(asyncio.wrap_future(self._submit(work, exclusive)))

    def run_now(self, work: Callable[[Transaction], T], *, exclusive: bool = False) -> T:
        """The same without an event loop."""
        return self._submit(work, exclusive).result()

    def close(self) -> None:
        """Finish what was submitted."""
        self._line.put(None)
        self._thread.join()
        self._closed.set()
        self._connection.close()

    def _submit(self, work: Callable[[Transaction], T], exclusive: bool) -> Future[T]:
        future: Future[T] = Future()
        self._line.put((work, future, exclusive))
        return future

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        except BaseException:  # without this thread nobody is let in or counted, and no probe would notice
            logger.critical("the database's thread ended, and so does this process", exc_info=True)
            logging.shutdown()
            os._exit(_EXIT_CODE)

    def _do_next(self) -> bool:
        """Do what waits, as one transaction; return False at the end."""
        self._beat = time.monotonic()
        try:
            item = self._line.get(timeout=BEAT_SECONDS)
        except queue.Empty:
            return True
        together: list[Item] = []
        while item is not None:
            if item[1].set_running_or_notify_cancel():  # from here on nobody can cancel it
                together.append(item)
            if len(together) >= MOST_TOGETHER:
                break
            try:
                item = self._line.get_nowait()
            except queue.Empty:
                break
        if together:
            self._do(together)
        return item is not None

    def _do(self, together: list[Item]) -> None:
        try:
            results = self._until_connected(
                [work for work, _, _ in together], any(exclusive for _, _, exclusive in together)
            )
        except Exception as exc:
            if len(together) == 1 or isinstance(exc, DatabaseAway):
                for _, future, _ in together:
                    future.set_exception(exc)
                return
            for item in together:  # one of them is wrong, the others are not
                self._do([item])
            return
        for (_, future, _), result in zip(together, results, strict=True):
            future.set_result(result)

    def _until_connected(self, works: list[Work], exclusive: bool) -> list[Any]:
        deadline = time.monotonic() + RECONNECT_SECONDS
        while True:
            self._beat = self._busy_since = time.monotonic()
            try:
                return self._once(works, exclusive)
            except Exception as exc:
                if not self._connection.is_lost(exc):
                    raise
                if time.monotonic() > deadline:
                    raise DatabaseAway(f"the database is away: {str(exc).strip()}") from exc
                logger.warning("the database is away, trying again: %s", str(exc).strip())
            finally:
                self._busy_since = None
            time.sleep(0.2)  # in the database's own thread
            self._connect_again()

    def _connect_again(self) -> None:
        self._beat = time.monotonic()
        with suppress(Exception):
            self._connection.close()
            connection = connect(self._url)
            connection.limit_time()
            self._connection = connection

    def _cut_hanging(self) -> None:
        """Cut connections to a server that accepted a statement and never answers, until closed."""
        while not self._closed.wait(1.0):
            since = self._busy_since
            if since is not None and time.monotonic() - since > HANG_SECONDS:
                logger.warning("the database does not answer; the connection is cut")
                self._connection.cut()

    def _done(self, work: Work) -> Any:
        self._beat = self._busy_since = time.monotonic()  # many works may be one transaction
        return work(self._connection.transaction)

    def _once(self, works: list[Work], exclusive: bool) -> list[Any]:
        connection = self._connection
        # The lock comes before all rows: works of a group lock theirs in an order that nobody knows.
        try:
            connection.begin(exclusive=exclusive)
            results = [self._done(work) for work in works]
            connection.commit()
        except BaseException:
            with suppress(Exception):
                connection.rollback()
            raise
        return results


def default_url(environment: Mapping[str, str]) -> str:
    """Return the address of the database in this user's data folder."""
    return f"{SQLITE}{folders.data(environment) / 'gateway.db'}"
