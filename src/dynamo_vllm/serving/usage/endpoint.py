"""Serves the endpoint where workers report tokens, in a gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.serving.usage.record import ENDPOINT, UsageRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from dynamo.runtime import DistributedRuntime

    TakeRecords = Callable[[list[UsageRecord]], Awaitable[list[int]]]


async def serve(drt: DistributedRuntime, namespace: str, take: TakeRecords) -> None:
    """Pass records to `take`, and tell the worker which of them it has taken, by their indexes."""

    async def answer(request: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"taken": await take(msgspec.convert(request["records"], list[UsageRecord]))}

    await drt.endpoint(f"{namespace}.{ENDPOINT}").serve_endpoint(answer, graceful_shutdown=False)
