"""What workers say of their caches, and what the router has heard of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from harness import metrics
from harness.stack import Stack
from harness.waiting import until

_SAID = "dynamo_component_kv_publisher_zmq_events_total"
_HEARD = "dynamo_component_kv_cache_events_applied_total"


def said(made: Stack) -> float:
    """How many events workers have passed on."""
    return sum(worker.metric(_SAID, stage="accepted") for worker in made.workers)


def heard(made: Stack, **labels: object) -> float:
    """How many events are in the router's index, of all models."""
    return metrics.total(made.get("/metrics").text, _HEARD, **labels)


@contextlib.contextmanager
def known_to_router(made: Stack) -> Iterator[None]:
    """For one request with a new prompt and nothing beside it: afterwards the router knows who has it."""
    stored = {"event_type": "stored", "status": "ok"}
    before = heard(made, **stored)
    yield
    until("its KV events at the router", lambda: heard(made, **stored) > before)
