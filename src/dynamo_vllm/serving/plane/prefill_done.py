"""Tells the router that a request no longer computes its prompt.

The router's queue takes every request without a first token for one whose prompt is being computed. One that
waits for an image, or hangs, would keep others waiting. So its worker reports its prompt as computed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dynamo.llm import WorkerType

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.runtime import Context, Endpoint

logger = logging.getLogger(__name__)
COMPUTE_PROMPTS = ("Aggregated", "Prefill")
"""A decode worker has no prompts in the queue, and the same message would end its wait for a transfer."""


async def prefill_done(endpoint: Endpoint, worker_type: str) -> Callable[[Context, int], None]:
    """Return the function that reports a request of a rank; it raises nothing."""
    source = None
    if worker_type in COMPUTE_PROMPTS:
        source = await endpoint.first_token_source(getattr(WorkerType, worker_type))

    def report(context: Context, rank: int) -> None:
        if source is None:
            return
        try:
            source.bind(context, rank)
            context.notify_first_token()
        except Exception as exc:
            logger.warning("request %s: the router cannot be told of its long wait: %s", context.id(), exc)

    return report
