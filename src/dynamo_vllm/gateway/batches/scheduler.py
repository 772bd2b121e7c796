"""Chooses which batches this gateway runs: tenants take turns, and nobody keeps a place while it waits."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.batches.outage import is_outage
from dynamo_vllm.gateway.batches.runner import NotOurs, Run

if TYPE_CHECKING:
    from dynamo_vllm.gateway.batches.runner import Tools
    from dynamo_vllm.gateway.batches.store import WaitingBatch

logger = logging.getLogger(__name__)
BATCHES_PER_TENANT = 4
MOST_BATCHES = 64
MOST_ENDING = 4
"""Cancelled and expired batches, which only write their files, beyond those that run."""
LIMITED_SECONDS = 30.0
"""How long a batch keeps its place while its limits let no line pass, if another tenant has none."""
MOST_FAILURES = 3
TURN_SECONDS = 300.0
"""How long a batch that runs keeps its place then."""


class Scheduler:
    """Takes batches that nobody runs, from `start` to `close`."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._database = tools.database
        self._running: dict[str, _Running] = {}
        self._nudged = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Return the loop, which never ends by itself."""
        self._loop = asyncio.get_running_loop().create_task(self._take())
        return self._loop

    async def close(self) -> None:
        """Stop; what runs goes on in another gateway, or in the next one."""
        tasks = [running.task for running in self._running.values()]
        if self._loop is not None:
            tasks.append(self._loop)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def nudge(self) -> None:
        """Look for new batches now."""
        self._nudged.set()

    def stop(self, batch_id: str) -> None:
        """Look at the state of a batch now: it was cancelled. Another gateway notices with its next beat."""
        if (running := self._running.get(batch_id)) is not None:
            running.run.stop()
        self.nudge()

    async def _take(self) -> None:
        while True:
            try:
                self._nudged.clear()
                await self._look()
            except Exception:
                logger.exception("batches cannot be read; trying again")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tools.beat_seconds):
                    await self._nudged.wait()

    async def _look(self) -> None:
        waiting = await self._database.run(lambda t: self._tools.store.waiting(t, BATCHES_PER_TENANT))
        waiting = [batch for batch in waiting if batch.id not in self._running]  # its beat may be late
        while (batch := self._next(waiting)) is not None:
            waiting.remove(batch)
            await self._claim(batch)
        await self._make_room(waiting)

    def _next(self, waiting: list[WaitingBatch]) -> WaitingBatch | None:
        """Return the next batch that there is a place for: of the tenant with the fewest."""
        counts, ending = self._counts(), self._counts(is_over=True)
        eligible = [
            batch
            for batch in waiting
            if (ending.total() < MOST_ENDING if batch.is_over else _has_place(counts, batch.tenant))
        ]
        return min(
            eligible, key=lambda batch: (ending if batch.is_over else counts)[batch.tenant], default=None
        )

    def _counts(self, *, is_over: bool = False) -> Counter[str]:
        """Return how many batches of each tenant run, or are over and write their files."""
        return Counter(
            running.batch.tenant for running in self._running.values() if running.batch.is_over == is_over
        )

    async def _claim(self, waiting: WaitingBatch) -> None:
        """Run a batch, unless another gateway was faster or has the file."""
        store, owner = self._tools.store, secrets.token_hex(8)
        batch = await self._database.run(lambda t: store.claim(t, waiting.id, owner))
        if batch is None:
            return
        run = Run(self._tools, batch, owner)
        if await self._has_file(waiting):
            task = asyncio.get_running_loop().create_task(self._run(run))
            self._running[batch.id] = _Running(waiting, run, task)
        elif run.is_overdue:
            await run.abandon()
        else:
            await self._release(run)

    async def _has_file(self, batch: WaitingBatch) -> bool:
        return await asyncio.to_thread(self._tools.files.path(batch.file_id).exists)

    async def _make_room(self, waiting: list[WaitingBatch]) -> None:
        """Park as many batches as there are tenants that wait for their first place."""
        counts = self._counts()
        if counts.total() < MOST_BATCHES:
            return
        homeless = {
            batch.tenant: batch for batch in waiting if not batch.is_over and not counts[batch.tenant]
        }
        places = sum([await self._has_file(batch) for batch in homeless.values()])
        places -= sum(running.run.is_parked for running in self._running.values())
        candidates = [running for running in self._running.values() if running.may_be_parked()]
        candidates.sort(
            key=lambda running: (running.run.limited_since is None, -counts[running.batch.tenant])
        )
        for running in candidates[: max(0, places)]:
            logger.info("batch %s: makes room for another tenant's", running.batch.id)
            running.run.park()

    async def _run(self, run: Run) -> None:
        try:
            failures, reason = await self._database.run(lambda t: self._tools.store.failures(t, run.batch.id))
            if failures >= MOST_FAILURES:
                await run.fail(reason)
            else:
                await run.run()
                if run.is_parked:
                    await self._release(run)
        except NotOurs:
            logger.info("batch %s: another gateway runs it now", run.batch.id)
        except Exception as exc:
            await self._note(run, exc)
        except asyncio.CancelledError:
            with suppress(Exception):
                await asyncio.shield(self._release(run))
            raise
        finally:
            del self._running[run.batch.id]
            self._nudged.set()

    async def _note(self, run: Run, exc: Exception) -> None:
        """Count a run that failed; the batch ends after some of them. It rests until it counts as stale."""
        if is_outage(exc) and not run.is_overdue:
            logger.warning("batch %s: cannot go on now: %s", run.batch.id, exc)
            return
        logger.error("batch %s: cannot go on", run.batch.id, exc_info=exc)
        reason = type(exc).__name__
        try:
            failures = await self._database.run(
                lambda t: self._tools.store.note_failure(t, run.batch.id, reason)
            )
            if failures >= MOST_FAILURES or run.is_overdue:
                await run.fail(reason)
        except NotOurs:
            logger.info("batch %s: another gateway runs it now", run.batch.id)
        except Exception:
            logger.exception("batch %s: cannot be ended; trying again", run.batch.id)

    async def _release(self, run: Run) -> None:
        await self._database.run(lambda t: self._tools.store.release(t, run.batch.id, run.owner))


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch with a place."""

    batch: WaitingBatch
    run: Run
    task: asyncio.Task[None]
    began: float = field(default_factory=time.monotonic)

    def may_be_parked(self) -> bool:
        if self.run.is_parked or self.batch.is_over:
            return False
        now, since = time.monotonic(), self.run.limited_since
        return now > self.began + TURN_SECONDS or (since is not None and now > since + LIMITED_SECONDS)


def _has_place(counts: Counter[str], tenant: str) -> bool:
    return counts[tenant] < BATCHES_PER_TENANT and counts.total() < MOST_BATCHES
