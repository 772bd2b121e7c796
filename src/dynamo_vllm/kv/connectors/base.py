"""Defines KV cache transfer: what a connector tells vLLM, and the parameters it passes on."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_vllm.config.options.kv_cache import OFFLOAD_GB
from dynamo_vllm.config.role_cards import CARDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynamo_vllm.config.options.kv_cache import DiskSpace
    from dynamo_vllm.config.role_cards import RoleCard
    from dynamo_vllm.job import Adapter, SamplingSpec


class Rejected(ValueError):
    """Transfer parameters that must not reach the engine; the prompt is then computed here."""


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
    """How long a prefill engine keeps a KV cache that nobody fetches."""
    offload_gb: float = OFFLOAD_GB
    """Host memory for KV caches that leave the engines of this worker, on this machine."""
    disk: DiskSpace | None = None
    """A folder for KV caches that leave the host memory."""
    ranks: int = 1
    """Engines of this worker on this machine, which share both."""
    identity: str = ""
    """Equal for engines whose KV caches of the same tokens are equal; needed with a disk."""
    has_handover: bool = False
    """Another connector moves KV caches from prefill to decode."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that the user set; they are kept."""
    find_port: Callable[[], int] = free_port

    @property
    def card(self) -> RoleCard:
        return CARDS[self.role]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a connector needs around its engine."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the engine's processes, without those the user set."""
    shares_metrics: bool = False
    """Its metrics are created in the engine's processes; a folder brings them to the worker."""
    metrics_url: str | None = None
    """Where it serves its own metrics."""
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
        """It supports one kind of cache block, so vLLM's hybrid caches are off on both sides."""

    def engine_config(self, place: ConnectorPlace) -> dict[str, Any]:
        """vLLM's kv_transfer_config."""

    def needs(self, place: ConnectorPlace) -> Needs:
        """Return what must exist before the engine starts. Raises ConfigError if it cannot work there."""

    def prefill_params(self) -> dict[str, object] | None:
        """Return the parameters of a prefill job; None if the connector needs none."""

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> dict[str, object] | None:
        """Return the checked parameters of a decode job; None if there is nothing to fetch. Raises
        Rejected.
        """


def kv_role(place: ConnectorPlace) -> str:
    return place.card.kv_role


def unset(wanted: Mapping[str, str], place: ConnectorPlace) -> dict[str, str]:
    """Return those of the wanted variables that the user has not set."""
    return {name: value for name, value in wanted.items() if name not in place.environment}


PREFILL_PARAMS: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""Tells a vLLM connector to keep the KV cache for an engine that will fetch it."""


LEASE_MARGIN_SECONDS = 1.0
LEFT_TO_DECODE: Mapping[str, Any] = {"left_to_decode": True}
"""What a prefill worker sends the frontend for a prompt that it did not compute."""


def must_be_computed_by_decode(sampling: SamplingSpec) -> bool:
    """Several choices would each fetch the KV cache, which can be fetched only once. And logprobs of a prompt
    need its computation: for fetched tokens vLLM 0.30 returns uninitialised memory."""
    return sampling.n > 1 or sampling.prompt_logprobs is not None


def handover(
    transfer: Mapping[str, object] | None,
    lease_seconds: float,
    adapter: Adapter | None = None,
    cached_tokens: int | None = None,
) -> dict[str, object]:
    """What a prefill worker sends through the frontend to a decode worker."""
    return {
        "kv_transfer_params": transfer,
        "cached_tokens": cached_tokens or 0,
        "expires_at": time.time() + lease_seconds,
        "adapter": adapter.content if adapter is not None else "",
    }


def refuse_other_adapter(handed: object, adapter: Adapter | None) -> None:
    """A name may have different content here and there while an adapter is being replaced."""
    if not isinstance(handed, dict) or "adapter" not in handed:
        return
    if handed["adapter"] != (adapter.content if adapter is not None else ""):
        raise Rejected(f"it is of other weights than {adapter.name if adapter else 'the base model'} here")


def transfer_params(handed: object) -> dict[str, object]:
    """Return the parameters inside what the frontend passes on.

    vLLM 0.30 does not notice an expired lease: it reads blocks that hold another prompt by now, and answers
    from them.
    """
    if not isinstance(handed, dict) or not isinstance(handed.get("kv_transfer_params"), dict):
        raise Rejected("no kv_transfer_params")
    expires_at = handed.get("expires_at")
    if not isinstance(expires_at, int | float):
        raise Rejected("no end of the lease")
    late = time.time() + LEASE_MARGIN_SECONDS - expires_at
    if late > 0:
        raise Rejected(f"the lease is over by {late:.1f} s (or the clocks of the two machines differ)")
    params = dict(handed["kv_transfer_params"])
    # vLLM 0.31 and newer would count these as cached, and not what the transfer brought.
    params.pop("remote_prefill_cached_tokens", None)
    return params


def prefill_cached_tokens(handed: object) -> int:
    """How many tokens of the prompt the prefill worker found in its own cache."""
    found = handed.get("cached_tokens") if isinstance(handed, dict) else None
    return found if isinstance(found, int) else 0
