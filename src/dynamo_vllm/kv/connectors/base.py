"""How a KV cache goes from one engine to another: what a connector tells vLLM, and what it hands over."""

from __future__ import annotations

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

    def decode_params(self, handed: object, prompt_tokens: int) -> dict[str, Any] | None:
        """What a decode job carries, checked; None when there is nothing to fetch. Raises Rejected."""


def kv_role(place: Place) -> str:
    return {"prefill": "kv_producer", "decode": "kv_consumer"}.get(place.role, "kv_both")


PREFILL_PARAMS: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""Tells a vLLM connector to keep the cache for an engine that will ask for it."""


def transfer_params(handed: object) -> dict[str, Any]:
    """The parameters inside what the frontend carries over."""
    if isinstance(handed, dict) and isinstance(handed.get("kv_transfer_params"), dict):
        return dict(handed["kv_transfer_params"])
    raise Rejected("no kv_transfer_params")
