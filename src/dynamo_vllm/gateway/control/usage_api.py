"""Serves /v1/usage: what a tenant has used, or all of them for a key with --admin."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.routing import Route

from dynamo_vllm.gateway.exchange import whole_number
from dynamo_vllm.gateway.identity import caller_of
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store.usage import GROUPS, Usage, usage

if TYPE_CHECKING:
    from starlette.requests import Request

    from dynamo_vllm.gateway.database import Database

DAY = 86400
LAST_SECOND = 253402300799
"""Of the year 9999, the last one that has a date."""
MOST_SUMS = 10_000
_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{0,9})?")
_QUOTED_CHARACTERS = 40


def routes(database: Database) -> list[Route]:
    async def answer(request: Request) -> JSONResponse:
        caller = caller_of(request.headers)
        query = request.query_params
        by = groups(query.get("by", "day"))
        since = moment(query.get("since"), "since", time.time() - 29 * DAY)
        until = moment(query.get("until"), "until", time.time())
        limit = whole_number(request, "limit", MOST_SUMS, 1, MOST_SUMS)
        tenant = None if caller.is_admin else caller.tenant
        sums = await database.run(usage(since, until, (*by, "tenant"), tenant=tenant, limit=limit + 1))
        data = [shown(group) for group in sums[:limit]]
        return JSONResponse({"object": "list", "data": data, "has_more": len(sums) > limit})

    return [Route("/v1/usage", answer, methods=["GET"])]


def groups(text: str) -> tuple[str, ...]:
    """Return what to sum up by; raise GatewayError for what there is not."""
    names = text.split(",")
    unknown = [name for name in names if name not in GROUPS]
    if unknown or len(names) > len(GROUPS):
        word = quoted(unknown[0] if unknown else text)
        raise GatewayError(400, f"by={word} is unknown; use {', '.join(GROUPS)}", parameter="by")
    return tuple(dict.fromkeys(names))


def moment(text: str | None, name: str, default: float) -> float:
    """Return a day or a number of seconds since 1970; raise GatewayError for what is none."""
    if text is None:
        return default
    try:
        seconds = float(text) if _SECONDS.fullmatch(text) else _timestamp(text)
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds <= LAST_SECOND:
        message = f"{name}={quoted(text)} is no day such as 2026-01-31, and no seconds since 1970"
        raise GatewayError(400, message, parameter=name)
    return seconds


def _timestamp(text: str) -> float:
    if not text.isascii():  # Python reads the digits of every script
        raise ValueError(text)
    date = datetime.fromisoformat(text)
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()


def quoted(text: str) -> str:
    return text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}…"


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
