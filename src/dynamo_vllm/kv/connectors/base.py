"""How a KV cache goes from one engine to another: what a connector tells vLLM, and what it hands over."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_vllm.config.role_cards import CARDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynamo_vllm.config.role_cards import RoleCard
    from dynamo_vllm.job import Adapter, SamplingSpec

OFFLOAD_GB = 5.0
"""Host memory for caches that leave an engine, as LMCache itself would take."""


class Rejected(ValueError):
    """A hand-over that must not reach the engine; the request is then computed here as a whole."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorPlace:
    """Where a connector works."""

    role: str
    device: str
    lease_seconds: int = 30
    """How long a prefill engine keeps a cache that nobody fetches."""
    offload_gb: float = OFFLOAD_GB
    """Host memory for caches that leave the engine."""
    has_handover: bool = False
    """Another connector beside this one hands caches from prefill to decode."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables the user set; what stands there is kept."""
    find_port: Callable[[], int] = free_port

    @property
    def card(self) -> RoleCard:
        return CARDS[self.role]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a connector wants around the engine that runs it."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the engine's processes, without those the user set."""
    shares_metrics: bool = False
    """Its Prometheus series are made in the engine's processes; a folder brings them to the worker."""
    metrics_url: str | None = None
    """Where it serves series of its own."""
    merged_events: str | None = None
    """Where it publishes the engine's KV events together with its own."""

    def and_those(self, other: Needs) -> Needs:
        return Needs(
            environment={**self.environment, **other.environment},
            shares_metrics=self.shares_metrics or other.shares_metrics,
            metrics_url=self.metrics_url or other.metrics_url,
            merged_events=self.merged_events or other.merged_events,
        )


class Connector(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def has_plain_blocks(self) -> bool:
        """It knows one kind of cache block, so that vLLM's hybrid caches are off: on both sides of a pair."""

    def engine_config(self, place: ConnectorPlace) -> dict[str, Any]:
        """vLLM's kv_transfer_config."""

    def needs(self, place: ConnectorPlace) -> Needs:
        """What must be there before the engine starts. Raises ConfigError for a place it cannot work in."""

    def prefill_params(self) -> dict[str, Any] | None:
        """What a prefill job carries; None when the connector needs nothing per job."""

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> dict[str, Any] | None:
        """What a decode job carries, checked; None when there is nothing to fetch. Raises Rejected."""


def kv_role(place: ConnectorPlace) -> str:
    return place.card.kv_role


def unset(wanted: Mapping[str, str], place: ConnectorPlace) -> dict[str, str]:
    """Those of the wanted variables the user has not set."""
    return {name: value for name, value in wanted.items() if name not in place.environment}


PREFILL_PARAMS: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""Tells a vLLM connector to keep the cache for an engine that will ask for it."""


LEASE_MARGIN_SECONDS = 1.0
LEFT_TO_DECODE: Mapping[str, Any] = {"left_to_decode": True}
"""What a prefill worker gives the frontend for a prompt that it did not compute."""


def must_be_computed_by_decode(sampling: SamplingSpec) -> bool:
    """Several choices would each fetch the cache, which is given away once. And logprobs of a prompt come of
    computing it: for what was fetched vLLM 0.30 tells what is in memory that nobody wrote."""
    return sampling.n > 1 or sampling.prompt_logprobs is not None


def handover(
    transfer: Mapping[str, Any] | None, lease_seconds: float, adapter: Adapter | None = None
) -> dict[str, Any]:
    """What a prefill worker gives the frontend to carry to a decode worker."""
    return {
        "kv_transfer_params": transfer,
        "expires_at": time.time() + lease_seconds,
        "adapter": adapter.content if adapter is not None else "",
    }


def refuse_other_adapter(handed: object, adapter: Adapter | None) -> None:
    """A name may stand for other content here than there, while an adapter is being replaced."""
    if not isinstance(handed, dict) or "adapter" not in handed:
        return
    if handed["adapter"] != (adapter.content if adapter is not None else ""):
        raise Rejected(f"it is of other weights than {adapter.name if adapter else 'the base model'} here")


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
