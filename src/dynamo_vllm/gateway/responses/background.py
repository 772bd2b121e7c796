"""Runs background responses, each in one gateway at a time.

A gateway says every few seconds that it still runs a response. If it stops to say so, because it was killed
or restarted, another one (or the next process) starts the request again: the client has seen nothing of the
first attempt, and the ledger counts both under the same id. A response that was started too often has failed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.gateway.exchange import ask
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.responses.asked import body_for_frontend
from dynamo_vllm.gateway.responses.items import Fields, joined, output_items, raw
from dynamo_vllm.gateway.responses.store import ENDED

if TYPE_CHECKING:
    import httpx

    from dynamo_vllm.gateway.database import Database, Transaction
    from dynamo_vllm.gateway.responses.store import Kept, ResponseStore

logger = logging.getLogger(__name__)
PATH = "/v1/responses"
MOST_STARTS = 3
MOST_TRIES = 6
BUSY = (429, 502, 503, 529)
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0


class Background:
    """Takes what waits in the table and runs it, some at a time."""

    def __init__(
        self,
        database: Database,
        store: ResponseStore,
        frontend: httpx.AsyncClient,
        *,
        concurrency: int,
        beat_seconds: float,
    ) -> None:
        self._database = database
        self._store = store
        self._frontend = frontend
        self._concurrency = concurrency
        self._beat_seconds = beat_seconds
        self._stale_seconds = 4 * beat_seconds
        self._owner = secrets.token_hex(8)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._nudged = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop().create_task(self._take())

    async def close(self) -> None:
        """Stop; what runs is started again by the next gateway, once it is due."""
        tasks = [task for task in (self._loop, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def nudge(self) -> None:
        """Say that there is something new."""
        self._nudged.set()

    async def cancel(self, response_id: str, tenant: str) -> Kept:
        """Return the response, cancelled unless it had ended."""

        def work(t: Transaction) -> Kept:
            found = self._store.in_background(t, response_id, tenant)
            if found.status in ENDED:
                return found
            self._store.finish(t, found, "cancelled", _with_status(found, "cancelled"), [])
            return self._store.in_background(t, response_id, tenant)

        kept = await self._database.run(work)
        if (task := self._running.get(response_id)) is not None:
            task.cancel()  # another gateway notices with its next beat
        return kept

    async def _take(self) -> None:
        while True:
            try:
                self._nudged.clear()
                await self._claim()
            except Exception:
                logger.exception("background responses cannot be read; trying again")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._beat_seconds):
                    await self._nudged.wait()

    async def _claim(self) -> None:
        while (free := self._concurrency - len(self._running)) > 0:
            ids = await self._database.run(partial(self._waiting, free))
            for response_id in ids:
                await self._try(response_id)
            if len(ids) < free:
                return

    def _waiting(self, limit: int, t: Transaction) -> list[str]:
        return self._store.waiting(t, self._stale_seconds, limit)

    async def _try(self, response_id: str) -> None:
        mine = await self._database.run(
            lambda t: self._store.claim(t, response_id, self._owner, self._stale_seconds)
        )
        if mine is not None:
            task = asyncio.get_running_loop().create_task(self._run(mine))
            self._running[response_id] = task
            task.add_done_callback(lambda _: self._ended(response_id))

    def _ended(self, response_id: str) -> None:
        self._running.pop(response_id, None)
        self._nudged.set()

    async def _run(self, response: Kept) -> None:
        beating = asyncio.get_running_loop().create_task(self._beat(response.id, asyncio.current_task()))
        try:
            try:
                if response.starts > MOST_STARTS:
                    raise GatewayError(500, f"the gateway ended {MOST_STARTS} times while it ran")
                answer = await self._answer(response)
            except GatewayError as exc:
                logger.info("response %s: failed: %s", response.id, exc.message)
                await self._finish(response, _failed(response, exc))
            else:
                await self._finish(response, answer)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("response %s: cannot be run", response.id)
        finally:
            beating.cancel()

    async def _beat(self, response_id: str, runs: asyncio.Task[None] | None) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            with suppress(Exception):
                if not await self._database.run(lambda t: self._store.beat(t, response_id, self._owner)):
                    break
        if runs is not None:
            runs.cancel()  # cancelled or deleted by a client, perhaps through another gateway

    async def _answer(self, response: Kept) -> Fields:
        def items(t: Transaction) -> list[str]:
            before = (
                []
                if response.previous is None
                else self._store.history(t, response.previous, response.tenant)
            )
            return before + self._store.given(t, response.id)

        fields = msgspec.json.decode(response.request or "{}", type=Fields)
        headers = msgspec.json.decode(response.headers or "{}", type=dict[str, str])
        body = body_for_frontend(fields, await self._database.run(items), True)
        wait = FIRST_WAIT_SECONDS
        for tries in range(1, MOST_TRIES + 1):
            try:
                return msgspec.json.decode(await ask(self._frontend, PATH, body, headers), type=Fields)
            except GatewayError as exc:
                if exc.status not in BUSY or tries == MOST_TRIES:
                    raise
                await asyncio.sleep(min(wait, LONGEST_WAIT_SECONDS))
                wait *= 2
        raise AssertionError

    async def _finish(self, response: Kept, answer: Fields) -> None:
        status = msgspec.json.decode(answer["status"], type=str)
        made = output_items(answer)
        created = msgspec.json.decode(response.body, type=Fields)["created_at"]
        body = kept_body(answer | {"created_at": created}, response.id, response.previous, is_background=True)

        def work(t: Transaction) -> None:
            if self._store.beat(t, response.id, self._owner):
                self._store.finish(t, response, status, body, made)

        await self._database.run(work)


def kept_body(answer: Fields, response_id: str, previous: str | None, *, is_background: bool = False) -> str:
    """Return a response as it is kept: with our fields, without its output."""
    ours = {
        "id": raw(response_id),
        "previous_response_id": raw(previous),
        "store": raw(True),
        "background": raw(is_background),
        "output": joined([]),
    }
    return msgspec.json.encode(answer | ours).decode()


def shown(kept: Kept) -> bytes:
    """Return a kept response as clients get it."""
    fields = msgspec.json.decode(kept.body, type=Fields)
    return msgspec.json.encode(fields | {"status": raw(kept.status), "output": joined(kept.output)})


def _with_status(kept: Kept, status: str) -> str:
    fields = msgspec.json.decode(kept.body, type=Fields)
    return msgspec.json.encode(fields | {"status": raw(status)}).decode()


def _failed(kept: Kept, exc: GatewayError) -> Fields:
    fields = msgspec.json.decode(kept.body, type=Fields)
    code = exc.code or ("server_error" if exc.status >= 500 else "invalid_prompt")
    code = "rate_limit_exceeded" if exc.status == 429 else code
    return fields | {"status": raw("failed"), "error": raw({"code": code, "message": exc.message})}
