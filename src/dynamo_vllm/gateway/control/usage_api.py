"""Serves /v1/usage: what a tenant has used, or all of them for a key with --admin."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.routing import Route

from dynamo_vllm.gateway.identity import caller_of
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store.usage import GROUPS, Usage, usage

if TYPE_CHECKING:
    from starlette.requests import Request

    from dynamo_vllm.gateway.database import Database

DAY = 86400


def routes(database: Database) -> list[Route]:
    async def answer(request: Request) -> JSONResponse:
        caller = caller_of(request.headers)
        query = request.query_params
        by = tuple(dict.fromkeys(query.get("by", "day").split(",")))
        if unknown := [name for name in by if name not in GROUPS]:
            raise GatewayError(400, f"by={unknown[0]} is unknown; use {', '.join(GROUPS)}", parameter="by")
        since = moment(query.get("since"), "since", time.time() - 29 * DAY)
        until = moment(query.get("until"), "until", time.time())
        found = await database.run(usage(since, until, (*by, "tenant")))
        mine = [one for one in found if caller.is_admin or one.tenant == caller.tenant]
        return JSONResponse({"object": "list", "data": [shown(one) for one in mine]})

    return [Route("/v1/usage", answer, methods=["GET"])]


def moment(text: str | None, name: str, default: float) -> float:
    """Return a day or a number of seconds since 1970."""
    if text is None:
        return default
    try:
        return (
            float(text)
            if text.replace(".", "").isdecimal()
            else datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        )
    except ValueError:
        raise GatewayError(400, f"{name}={text} is no day such as 2026-01-31", parameter=name) from None


def shown(one: Usage) -> dict[str, Any]:
    day = None if one.day is None else datetime.fromtimestamp(one.day * DAY, UTC).date().isoformat()
    groups = {"day": day, "tenant": one.tenant, "key": one.key, "model": one.model}
    return {
        "object": "usage",
        **{name: value for name, value in groups.items() if value is not None},
        "requests": one.sums.requests,
        "prompt_tokens": one.sums.prompt_tokens,
        "cached_tokens": one.sums.cached_tokens,
        "completion_tokens": one.sums.completion_tokens,
        "total_tokens": one.sums.prompt_tokens + one.sums.completion_tokens,
    }
