"""How a KV cache goes from one engine to another: what a connector tells vLLM, and what it hands over."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Rejected(ValueError):
    """A hand-over that must not reach the engine; the request is then computed here as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a connector works."""

    role: str
    device: str
    lease_seconds: int = 30
    """How long a prefill engine keeps a cache that nobody fetches."""


class Connector(Protocol):
    @property
    def name(self) -> str: ...

    def engine_config(self, place: Place) -> dict[str, Any]:
        """vLLM's kv_transfer_config."""

    def prefill_params(self) -> dict[str, Any] | None:
        """What a prefill job carries; None when the connector needs nothing per job."""

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> dict[str, Any] | None:
        """What a decode job carries, checked; None when there is nothing to fetch. Raises Rejected."""


def kv_role(place: Place) -> str:
    return {"prefill": "kv_producer", "decode": "kv_consumer"}.get(place.role, "kv_both")


PREFILL_PARAMS: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""Tells a vLLM connector to keep the cache for an engine that will ask for it."""


LEASE_MARGIN_SECONDS = 1.0


def handover(transfer: Mapping[str, Any] | None, lease_seconds: float) -> dict[str, Any]:
    """What a prefill worker gives the frontend to carry to a decode worker."""
    return {"kv_transfer_params": transfer, "expires_at": time.time() + lease_seconds}


def transfer_params(handed: object) -> dict[str, Any]:
    """The parameters inside what the frontend carries over.

    vLLM 0.30 does not notice a lease that ran out: it reads blocks that hold another prompt by now, and
    answers from them.
    """
    if not isinstance(handed, dict) or not isinstance(handed.get("kv_transfer_params"), dict):
        raise Rejected("no kv_transfer_params")
    expires_at = handed.get("expires_at")
    if not isinstance(expires_at, int | float):
        raise Rejected("no end of the lease")
    late = time.time() + LEASE_MARGIN_SECONDS - expires_at
    if late > 0:
        raise Rejected(f"the lease is over by {late:.1f} s (or the clocks of the two machines differ)")
    return dict(handed["kv_transfer_params"])
