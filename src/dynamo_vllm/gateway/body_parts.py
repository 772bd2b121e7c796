"""Refuses JSON bodies that take too long to read: while one is read, all other requests wait.

Time goes with the number of values and escaped characters, not with bytes: a picture is fast, a list of
zeros is slow. Counting them in the text of the body takes a twentieth of the time, and counts commas in
texts too.
"""

from __future__ import annotations

from dynamo_vllm.gateway.replies import GatewayError

MOST_PARTS = 1 << 22
"""Commas and escaped characters of a body that is passed over."""
MOST_VALUES = 1 << 18
"""Commas of a body whose values all become objects of Python."""


def refuse_many_parts(body: bytes) -> None:
    """Raise GatewayError for a body that takes long to pass over."""
    if has_many_parts(body):
        raise _too_many(f"{MOST_PARTS} commas and escaped characters")


def has_many_parts(body: bytes) -> bool:
    return len(body) > MOST_PARTS and body.count(b",") + body.count(b"\\") > MOST_PARTS


def refuse_many_values(body: bytes) -> None:
    """Raise GatewayError for a body that takes long to decode as a whole."""
    refuse_many_parts(body)
    if len(body) > MOST_VALUES and body.count(b",") > MOST_VALUES:
        raise _too_many(f"{MOST_VALUES} commas")


def _too_many(what: str) -> GatewayError:
    return GatewayError(
        413, f"the body has more than {what}; send less in one request", code="too_many_values"
    )
