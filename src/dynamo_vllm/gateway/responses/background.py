"""Runs background responses under the limits of their keys, each in one gateway at a time.

Tenants take turns. A response that its key's limits do not allow yet goes back to the queue, without a slot.
A gateway says every few seconds that it still runs a response. If it stops to say so, because it was killed
or restarted, another one (or the next process) starts the request again: the client has seen nothing of the
first attempt, and the ledger counts both under the same id. A response that was started too often has failed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.deferred import NotYet
from dynamo_vllm.gateway.exchange import ask, storage_refusal
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.responses import history
from dynamo_vllm.gateway.responses.asked import body_for_frontend
from dynamo_vllm.gateway.responses.items import Fields, joined, output_items, raw
from dynamo_vllm.gateway.responses.queue import LONGEST_HOLD_SECONDS, ResponseQueue, headers_of
from dynamo_vllm.gateway.responses.store import ENDED, Name
from dynamo_vllm.gateway.tenant_slots import TenantSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

    from dynamo_vllm.gateway.database import Database, Transaction
    from dynamo_vllm.gateway.deferred import Gate
    from dynamo_vllm.gateway.responses.queue import Waiting
    from dynamo_vllm.gateway.responses.store import Kept, ResponseStore

logger = logging.getLogger(__name__)
PATH = "/v1/responses"
SHARE = 3
"""A tenant runs at most so many times the slots that are left for others."""
MOST_STARTS = 3
MOST_TRIES = 6
BUSY = (429, 502, 503, 529)
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
PAUSE_SECONDS = 0.1
"""Between two looks at the queue, however often somebody nudges."""
KEEP_SECONDS = 600.0
"""How long an answer is tried to be written down; after it the response is run again."""
KEEP_WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the frontend answered, with what the response's input can be named by."""

    fields: Fields
    names: Sequence[Name] = ()


class _NotOurs(Exception):
    """The response was cancelled or deleted, or another gateway runs it."""


class Background:
    """Takes what waits in the table and runs it, some at a time."""

    def __init__(
        self,
        database: Database,
        store: ResponseStore,
        frontend: httpx.AsyncClient,
        gate: Gate | None,
        reads: TenantSlots,
        *,
        concurrency: int,
        beat_seconds: float,
    ) -> None:
        """Without a gate all keys are valid and have no limits; `reads` are slots to read conversations."""
        self._database = database
        self._store = store
        self._frontend = frontend
        self._gate = gate
        self._reads = reads
        self._beat_seconds = beat_seconds
        self._concurrency = concurrency
        self._slots = TenantSlots(lambda: concurrency, share=SHARE)
        self._queue = ResponseQueue(4 * beat_seconds)
        self._owner = secrets.token_hex(8)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._held_keys: dict[str, float] = {}
        """Keys whose limits allow nothing now, and until when."""
        self._nudged = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Return the loop, which never ends by itself."""
        self._loop = asyncio.get_running_loop().create_task(self._take())
        return self._loop

    async def close(self) -> None:
        """Stop; what runs is started again by the next gateway, once it is due."""
        tasks = [task for task in (self._loop, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def nudge(self) -> None:
        """Say that there is something new."""
        self._nudged.set()

    def refuse_too_many(self, t: Transaction, tenant: str) -> None:
        """Raise GatewayError if no more of this tenant may wait."""
        self._queue.refuse_too_many(t, tenant)

    async def cancel(self, response_id: str, tenant: str) -> Kept:
        """Return the response, cancelled unless it had ended."""

        def work(t: Transaction) -> Kept:
            response = self._store.in_background(t, response_id, tenant)
            if response.status in ENDED:
                return response
            self._store.finish(t, response, "cancelled", _with_status(response, "cancelled"), [])
            return self._store.in_background(t, response_id, tenant)

        response = await self._database.run(work)
        if (task := self._running.get(response_id)) is not None:
            task.cancel()  # another gateway notices with its next beat
        return response

    # --- turns --------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        while True:
            try:
                self._nudged.clear()
                if self._slots.total < self._concurrency:
                    await self._start_some()
            except Exception as exc:
                if storage_refusal(exc) is None:
                    logger.exception("background responses cannot be read; trying again")
            await asyncio.sleep(PAUSE_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait_seconds()):
                    await self._nudged.wait()

    def _wait_seconds(self) -> float:
        """Return when to look again: at the next beat, or when the limits of a key allow something."""
        now = asyncio.get_running_loop().time()
        self._held_keys = {key: end for key, end in self._held_keys.items() if end > now}
        return max(0.0, min([self._beat_seconds, *(end - now for end in self._held_keys.values())]))

    async def _start_some(self) -> None:
        now = asyncio.get_running_loop().time()
        queues: dict[str, deque[Waiting]] = defaultdict(deque)
        held: dict[str, list[str]] = defaultdict(list)
        for row in await self._database.run(self._queue.waiting):
            if self._held_keys.get(row.key_id, 0.0) > now:
                held[row.key_id].append(row.id)
            elif row.id not in self._running:
                queues[row.tenant].append(row)
        while queues:
            tenant = min(queues, key=lambda name: (self._slots.running(name), queues[name][0].created))
            if not self._slots.try_take(tenant):
                del queues[tenant]
                continue
            self._start(queues[tenant].popleft())
            if not queues[tenant]:
                del queues[tenant]
        for key_id, ids in held.items():
            hold = partial(self._queue.hold_all, ids=ids, seconds=self._held_keys[key_id] - now)
            await self._database.run(hold)
            self._nudged.set()  # there may be more of the same tenant behind them

    def _start(self, row: Waiting) -> None:
        task = asyncio.get_running_loop().create_task(self._run(row.id))
        self._running[row.id] = task
        task.add_done_callback(lambda _: self._ended(row))

    def _ended(self, row: Waiting) -> None:
        self._running.pop(row.id, None)
        self._slots.give_back(row.tenant)
        self._nudged.set()

    # --- one response -------------------------------------------------------------------------------------

    async def _run(self, response_id: str) -> None:
        try:
            response = await self._database.run(lambda t: self._queue.lease(t, response_id, self._owner))
            if response is not None:
                await self._try(response)
        except _NotOurs:
            pass
        except Exception as exc:
            if storage_refusal(exc) is None:
                logger.exception("response %s: cannot be run", response_id)

    async def _try(self, response: Kept) -> None:
        headers = headers_of(response.headers)
        key_id = headers.pop(identity.KEY, "")
        try:
            if self._gate is not None and key_id:
                answer = await self._answer_under_limits(self._gate, response, key_id, headers)
            else:  # an earlier version queued it, or there are no keys
                answer = await self._answer_while_ours(response, key_id, headers)
        except NotYet as exc:
            seconds = min(exc.seconds, LONGEST_HOLD_SECONDS)
            self._held_keys[key_id] = asyncio.get_running_loop().time() + seconds + PAUSE_SECONDS
            await self._database.run(lambda t: self._queue.hold(t, response.id, self._owner, seconds))
        except GatewayError as exc:
            logger.info("response %s: failed: %s", response.id, exc.message)
            await self._finish(response, _Answer(_failed(response, exc)), only_ours=True)
        else:
            await self._finish(response, answer, only_ours=False)

    async def _answer_under_limits(
        self, gate: Gate, response: Kept, key_id: str, headers: dict[str, str]
    ) -> _Answer:
        """Raise NotYet if the limits of the key do not allow it now."""
        request_id = headers.get(identity.REQUEST) or response.id
        async with self._reads.slot(response.tenant):
            own = await self._database.run(partial(history.own_bodies, response_id=response.id))
        body = body_for_frontend(_request_of(response), joined(item.text for item in own), True)
        try:
            added = await gate.admit(request_id, key_id, PATH, body)
        except (NotYet, GatewayError):
            raise
        except BaseException:  # nobody knows whether it was admitted
            gate.ended(request_id)
            raise
        del own, body
        try:
            return await self._answer_while_ours(response, key_id, headers | added)
        finally:
            gate.ended(request_id)

    async def _answer_while_ours(self, response: Kept, key_id: str, headers: dict[str, str]) -> _Answer:
        """Return the answer; end the request if the response is no longer ours, or its key not valid."""
        starts = await self._database.run(lambda t: self._queue.begin(t, response.id, self._owner))
        if starts is None:
            raise _NotOurs
        if starts > MOST_STARTS:
            raise GatewayError(500, f"the gateway ended {MOST_STARTS} times while it ran")
        answering = asyncio.get_running_loop().create_task(self._answer(response, headers))
        try:
            while not (await asyncio.wait({answering}, timeout=self._beat_seconds))[0]:
                if key_id and self._gate is not None and not self._gate.is_valid(key_id):
                    raise GatewayError(
                        401, "the key of this response is no longer valid", code="invalid_api_key"
                    )
                if not await self._is_ours(response.id):
                    raise _NotOurs
            return answering.result()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _is_ours(self, response_id: str) -> bool:
        try:
            return await self._database.run(lambda t: self._queue.beat(t, response_id, self._owner))
        except Exception as exc:
            if storage_refusal(exc) is None:
                raise
            return True

    async def _answer(self, response: Kept, headers: dict[str, str]) -> _Answer:
        async with self._reads.slot(response.tenant):
            before, own = await self._database.run(lambda t: self._conversation(t, response))
        names = [Name(item.id, item.position, len(item.text)) for item in own if not item.is_reference]
        items = joined([*before, *(item.text for item in own)])
        body = body_for_frontend(_request_of(response), items, True)
        del before, own, items
        wait = FIRST_WAIT_SECONDS
        for tries in range(1, MOST_TRIES + 1):
            try:
                answer = await ask(self._frontend, PATH, body, headers)
                return _Answer(msgspec.json.decode(answer, type=Fields), names)
            except GatewayError as exc:
                if exc.status not in BUSY or tries == MOST_TRIES:
                    raise
                await asyncio.sleep(min(wait, LONGEST_WAIT_SECONDS))
                wait *= 2
        raise AssertionError

    def _conversation(self, t: Transaction, response: Kept) -> tuple[list[bytes], list[history.OwnItem]]:
        before = []
        if response.previous is not None:
            before = self._store.history(t, response.previous, response.tenant)
        return before, history.own_bodies(t, response.id)

    async def _finish(self, response: Kept, answer: _Answer, *, only_ours: bool) -> None:
        """Write down the answer; a database that cannot write now is asked again.

        An answer counts also if another gateway has begun anew, because the database was away for long.
        """
        status = msgspec.json.decode(answer.fields["status"], type=str)
        items = output_items(answer.fields)
        created = msgspec.json.decode(response.body, type=Fields)["created_at"]
        fields = answer.fields | {"created_at": created}
        body = kept_body(fields, response.id, response.previous, is_background=True)

        def work(t: Transaction) -> None:
            if self._queue.is_open(t, response.id, self._owner if only_ours else None):
                self._store.finish(t, response, status, body, items, answer.names)

        now = asyncio.get_running_loop().time
        deadline = now() + KEEP_SECONDS
        while True:
            try:
                return await self._database.run(work)
            except Exception as exc:
                if storage_refusal(exc) is None or now() > deadline:
                    raise
            await asyncio.sleep(KEEP_WAIT_SECONDS)


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


def _request_of(response: Kept) -> Fields:
    return msgspec.json.decode(response.request or "{}", type=Fields)


def _with_status(kept: Kept, status: str) -> str:
    fields = msgspec.json.decode(kept.body, type=Fields)
    return msgspec.json.encode(fields | {"status": raw(status)}).decode()


def _failed(kept: Kept, exc: GatewayError) -> Fields:
    fields = msgspec.json.decode(kept.body, type=Fields)
    code = exc.code or ("server_error" if exc.status >= 500 else "invalid_prompt")
    code = "rate_limit_exceeded" if exc.status == 429 else code
    return fields | {"status": raw("failed"), "error": raw({"code": code, "message": exc.message})}
