"""Holds what a worker tells its engine, whichever engine it is. Imports no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import nodes
from dynamo_vllm.config.rules.flags import engine_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynamo_vllm.forking import Zygote


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The part of the worker's options an engine needs."""

    model: str
    served_names: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    """The engine's flags as the user wrote them."""
    headless: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    parses_answers: bool = False
    """With these two; otherwise the frontend does."""
    takes_embeds: bool = False
    """Prompts may come as vectors."""
    omni: bool = False
    """The engine is a pipeline of vLLM-Omni."""
    stage_configs_path: str | None = None
    """Its stages, in a file of vLLM-Omni 0.30 or older."""
    guide_seconds: float = 2.0
    """Of processor time: what compiling one guide may take."""
    guide_memory_bytes: int = 512 << 20
    takes_guides: bool = True
    """Requests come with guides; judges of them are made ready."""
    direct_egress: bool = True
    """Plain token jobs bypass vLLM's queue and task for each request."""
    lora: bool = False
    """Adapters are loaded at run time."""
    publishes_kv_events: bool = True
    kv_event_port: int | None = None
    kv_transfer: Mapping[str, Any] | None = None
    """vLLM's kv_transfer_config, when a connector was chosen by name."""
    ec_transfer: Mapping[str, Any] | None = None
    """vLLM's ec_transfer_config, for an encoder and for whoever takes its output through a connector."""
    encoder_folder: str | None = None
    """Where encoders leave what they made."""
    encoder_folder_bytes: int = 0
    takes_encoded: bool = False
    """Media may come as an encoder's output."""
    side_channel_host: str | None = None
    side_channel_port: int | None = None
    scratch_folder: str = "/tmp"
    """Removed with the worker; sockets live here."""
    bind_host: str | None = None
    prometheus_folder: str | None = None
    traces_url: str | None = None
    """Where spans of requests go; None where nobody wants them."""
    connector_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables the connector needs; none that the user set."""
    has_plain_blocks: bool = False
    """The connector knows one kind of cache block."""
    connector_metrics_url: str | None = None
    """Where the connector serves series of its own."""
    merged_kv_events: str | None = None
    """Where the connector publishes the engine's KV events together with its own."""
    engines_here: int | None = None
    """Engines on this machine, those of other workers too; None where nobody counted them."""
    environment: dict[str, str] = field(default_factory=dict)
    """The variables the user set; what stands there is kept."""
    zygote: Zygote | None = None
    """Engine cores are forked from it; None starts them afresh."""
    on_resolved: Callable[[Mapping[str, Any]], None] = field(default=lambda _: None)
    """Told vLLM's arguments as it understood them, before it loads the model."""

    @property
    def is_encoder(self) -> bool:
        """Runs the model's encoder and nothing else of it."""
        return self.ec_transfer is not None and self.ec_transfer.get("ec_role") == "ec_producer"

    @property
    def node(self) -> nodes.Node:
        """Where this process stands among those of one engine."""
        return nodes.from_flags(self.headless, engine_flags(self.argv))
