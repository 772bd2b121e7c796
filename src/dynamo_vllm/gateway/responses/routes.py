"""Answers /v1/responses: the frontend generates, the history is kept here."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.exchange import (
    JSON,
    answered,
    ask,
    headers_for_frontend,
    json_reply,
    order_of,
    read_answer,
    read_body,
    send,
    storage_refusal,
    while_connected,
    whole_number,
)
from dynamo_vllm.gateway.identity import caller_of
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.responses import history, stream
from dynamo_vllm.gateway.responses.asked import body_for_frontend, queued, read
from dynamo_vllm.gateway.responses.background import PATH, Background, kept_body, shown
from dynamo_vllm.gateway.responses.items import (
    NULL,
    Fields,
    Item,
    joined,
    listed,
    new_id,
    output_items,
    raw,
)
from dynamo_vllm.gateway.responses.store import New, ResponseStore, absent
from dynamo_vllm.gateway.tenant_slots import TenantSlots

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
    from starlette.requests import Request

    from dynamo_vllm.gateway.database import Database, Transaction
    from dynamo_vllm.gateway.deferred import Gate
    from dynamo_vllm.gateway.responses.asked import Asked

logger = logging.getLogger(__name__)
T = TypeVar("T")
DAYS = 30.0
TENANT_BYTES = 1 << 30
CONCURRENCY = 16
BEAT_SECONDS = 5.0
SWEEP_SECONDS = 600.0
READS_TOGETHER = 4
"""Of conversations; a tenant has half of them. One takes the database's thread up to a second."""


class Responses:
    """The routes and what they need; `start` and `close` are for the life of the process."""

    def __init__(
        self,
        database: Database,
        frontend: httpx.AsyncClient,
        gate: Gate | None = None,
        *,
        days: float = DAYS,
        tenant_bytes: int = TENANT_BYTES,
        background_concurrency: int = CONCURRENCY,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._database = database
        self._frontend = frontend
        self._store = ResponseStore(days, tenant_bytes)
        self._reads = TenantSlots(lambda: READS_TOGETHER, share=1)
        self._background = Background(
            database,
            self._store,
            frontend,
            gate,
            self._reads,
            concurrency=background_concurrency,
            beat_seconds=beat_seconds,
        )
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> list[asyncio.Task[None]]:
        """Run background responses, and forget old ones, until `close`; return the loops that do."""
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())
        return [self._background.start(), self._sweeping]

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._background.close()

    def routes(self) -> list[Route]:
        one = PATH + "/{response_id}"
        return [
            Route(PATH, answered(self._create), methods=["POST"]),
            Route(f"{PATH}/input_tokens", answered(self._input_tokens), methods=["POST"]),
            Route(one, answered(self._get), methods=["GET"]),
            Route(one, answered(self._delete), methods=["DELETE"]),
            Route(f"{one}/cancel", answered(self._cancel), methods=["POST"]),
            Route(f"{one}/input_items", answered(self._input_items), methods=["GET"]),
        ]

    async def _create(self, request: Request) -> Response:
        body = await read_body(request)
        asked = read(body)
        headers = headers_for_frontend(request)
        if asked.is_plain:
            return await self._plain(request, body, headers, asked)
        tenant = caller_of(request.headers).tenant
        if asked.is_stored:
            self._store.refuse_too_large(asked.items)
        if asked.is_background:
            return await self._queue(request, asked, headers)
        items, whole = await self._whole(asked, tenant)
        answer = await while_connected(request, send(self._frontend, PATH, whole, headers))
        ours = {"previous_response_id": raw(asked.previous), "store": raw(asked.is_stored)}

        async def keep(response: Fields) -> Fields:
            return await self._kept(response, asked.previous, items, tenant) if asked.is_stored else response

        if asked.is_streamed:
            return stream.Relayed(answer, stream.changed(answer, ours, keep))
        whole_answer = await while_connected(request, read_answer(answer))
        return json_reply(await keep(msgspec.json.decode(whole_answer, type=Fields) | ours))

    async def _whole(self, asked: Asked, tenant: str) -> tuple[list[Item], bytes]:
        """Return the items with what they stand for, and the body for the frontend."""

        def work(t: Transaction) -> tuple[list[Item], list[bytes]]:
            items = self._store.resolved(t, asked.items, asked.previous, tenant)
            before = [] if asked.previous is None else history.bodies(t, asked.previous)
            return items, before + history.with_originals(t, items)

        items, bodies = await self._read(work, tenant, is_long=asked.names_others)
        return items, asked.for_frontend(bodies)

    async def _read(self, work: Callable[[Transaction], T], tenant: str, *, is_long: bool = True) -> T:
        """Return the result of work, which takes its turn if it may keep that of others waiting."""
        if not is_long:
            return await self._database.run(work)
        async with self._reads.slot(tenant):
            return await self._database.run(work)

    async def _plain(self, request: Request, body: bytes, headers: dict[str, str], asked: Asked) -> Response:
        """Pass on what needs no history, byte by byte."""
        if "background" in asked.fields or "previous_response_id" in asked.fields:
            body = body_for_frontend(asked.fields, asked.fields.get("input", NULL), asked.is_stored)
        answer = await while_connected(request, send(self._frontend, PATH, body, headers))
        if asked.is_streamed:
            return stream.Relayed(answer, stream.unchanged(answer))
        return Response(await while_connected(request, read_answer(answer)), media_type=JSON)

    async def _kept(self, response: Fields, previous: str | None, items: list[Item], tenant: str) -> Fields:
        """Keep an answer, and return it as the client gets it: what cannot be kept is still an answer."""
        try:
            await self._keep(response, previous, items, tenant)
        except GatewayError as exc:
            reason = exc.message
        except Exception as exc:
            refusal = storage_refusal(exc)
            reason = "the gateway failed; its log says why" if refusal is None else refusal.message
            if refusal is None:
                logger.exception("a response cannot be kept")
        else:
            return response
        return response | {"store": raw(False), "warning": raw(f"this response is not kept: {reason}")}

    async def _keep(self, response: Fields, previous: str | None, items: list[Item], tenant: str) -> None:
        response_id, status = (msgspec.json.decode(response[name], type=str) for name in ("id", "status"))
        new = New(
            id=response_id,
            tenant=tenant,
            previous=previous,
            status=status,
            body=kept_body(response, response_id, previous),
            given=items,
            made=output_items(response),
        )
        await self._make_room(new)
        await self._database.run(lambda t: self._store.keep(t, new))

    async def _make_room(self, new: New) -> None:
        """Forget a full tenant's oldest responses, some at a time, so that others need not wait for all."""
        while await self._database.run(lambda t: self._store.make_room(t, new)):
            pass

    async def _queue(self, request: Request, asked: Asked, headers: dict[str, str]) -> Response:
        caller = caller_of(request.headers)
        response_id = new_id("resp_")
        response = queued(response_id, asked)
        fields = {name: value for name, value in asked.fields.items() if name != "input"}
        headers = headers | {identity.KEY: caller.key_id, identity.REQUEST: caller.request_id or response_id}

        new = New(
            id=response_id,
            tenant=caller.tenant,
            previous=asked.previous,
            status="queued",
            body=msgspec.json.encode(response).decode(),
            given=asked.items,
            is_background=True,
            request=msgspec.json.encode(fields).decode(),
            headers=msgspec.json.encode(headers).decode(),
        )

        def work(t: Transaction) -> None:
            self._background.refuse_too_many(t, caller.tenant)
            items = self._store.resolved(t, asked.items, asked.previous, caller.tenant)
            self._store.keep(t, replace(new, given=items))

        await self._make_room(new)
        await self._read(work, caller.tenant, is_long=asked.names_others)
        self._background.nudge()
        return json_reply(response | {"output": joined([])})

    async def _input_tokens(self, request: Request) -> Response:
        asked = read(await read_body(request))
        tenant = caller_of(request.headers).tenant
        _, whole = await self._whole(asked, tenant)
        path, headers = f"{PATH}/input_tokens", headers_for_frontend(request)
        counted = await while_connected(request, ask(self._frontend, path, whole, headers))
        return Response(counted, media_type=JSON)

    async def _get(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise GatewayError(
                400,
                "a kept response is not streamed; leave out stream and poll it",
                code="unsupported_parameter",
                parameter="stream",
            )
        response_id, tenant = _named(request)
        found = await self._database.run(lambda t: self._store.get(t, response_id, tenant))
        if found is None:
            raise absent(response_id)
        return Response(shown(found), media_type=JSON)

    async def _delete(self, request: Request) -> Response:
        response_id, tenant = _named(request)
        await self._database.run(lambda t: self._store.delete(t, response_id, tenant))
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        response_id, tenant = _named(request)
        return Response(shown(await self._background.cancel(response_id, tenant)), media_type=JSON)

    async def _input_items(self, request: Request) -> Response:
        response_id, tenant = _named(request)
        limit = whole_number(request, "limit", 20, 1, 100)
        order, after = order_of(request), request.query_params.get("after")
        rows, has_more = await self._read(
            lambda t: self._store.inputs(t, response_id, tenant, order, after, limit), tenant
        )
        return json_reply(
            {
                "object": "list",
                "data": [listed(item_id, body) for item_id, body in rows],
                "first_id": rows[0][0] if rows else None,
                "last_id": rows[-1][0] if rows else None,
                "has_more": has_more,
            }
        )

    async def _sweep(self) -> None:
        while True:
            try:
                while await self._database.run(self._store.sweep):
                    pass
            except Exception as exc:
                if storage_refusal(exc) is None:
                    logger.exception("old responses cannot be forgotten; trying again")
            await asyncio.sleep(SWEEP_SECONDS)


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["response_id"], caller_of(request.headers).tenant
