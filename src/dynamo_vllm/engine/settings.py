"""Holds the settings that a worker passes to its engine, for every kind of engine. Imports no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config.nodes import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynamo_vllm.config.rules.flags import EngineFlags
    from dynamo_vllm.forking import Zygote


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Holds the part of the worker's options that an engine needs."""

    model: str
    served_names: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    """The engine's flags as the user wrote them."""
    flags: EngineFlags = field(default_factory=dict)
    """The same by name."""
    node: Node = Node()
    """The place of this process among the nodes of one engine."""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    parses_answers: bool = False
    """The worker parses answers with these two parsers; otherwise the frontend does."""
    takes_embeds: bool = False
    """Requests may have prompt embeddings."""
    omni: bool = False
    """The engine is a vLLM-Omni pipeline."""
    stage_configs_path: str | None = None
    """The stages of the pipeline, in a file in the format of vLLM-Omni 0.30 or older."""
    guide_seconds: float = 2.0
    """The CPU time that compiling one guide (structured-output constraint) may take."""
    guide_memory_bytes: int = 512 << 20
    takes_guides: bool = True
    """Requests may have guides, so the worker starts the processes that check them."""
    direct_egress: bool = True
    """Plain token jobs bypass vLLM's output queue and task per request."""
    pools: bool = False
    """The model computes vectors or scores, not text."""
    transcribes: bool = False
    """The model writes down speech."""
    pair_template: str | None = None
    """File of the template that puts a query and a document, or a chat, into one prompt."""
    lora: bool = False
    """LoRA adapters are loaded at run time."""
    publishes_kv_events: bool = True
    kv_event_port: int | None = None
    kv_transfer: Mapping[str, Any] | None = None
    """vLLM's kv_transfer_config, if the user chose a connector by name."""
    host_tier_bytes: int = 0
    """Host memory for KV caches that leave the engines of this worker."""
    ec_transfer: Mapping[str, Any] | None = None
    """vLLM's ec_transfer_config, for encode workers and for workers that read encoder output by connector."""
    encoder_folder: str | None = None
    """The folder where encode workers write encoder output."""
    encoder_folder_bytes: int = 0
    takes_encoded: bool = False
    """Requests may have encoder output instead of media."""
    side_channel_host: str | None = None
    side_channel_port: int | None = None
    scratch_folder: str = "/tmp"
    """A folder for sockets, which the worker removes when it ends."""
    bind_host: str | None = None
    prometheus_folder: str | None = None
    traces_url: str | None = None
    """Where to export request traces; None turns tracing off."""
    connector_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the connector needs, without those that the user set."""
    has_plain_blocks: bool = False
    """The connector supports only one kind of KV cache block."""
    connector_metrics_url: str | None = None
    """Where the connector serves its own Prometheus series."""
    merged_kv_events: str | None = None
    """Where the connector publishes the engine's KV events together with its own."""
    engines_here: int | None = None
    """The number of engines on this machine, including those of other workers; None if unknown."""
    environment: dict[str, str] = field(default_factory=dict)
    """The environment variables that the user set; they win over ours."""
    zygote: Zygote | None = None
    """Engine cores are forked from it; with None vLLM starts them itself."""
    on_resolved: Callable[[Mapping[str, Any]], None] = field(default=lambda _: None)
    """Is called with the arguments as vLLM resolved them, before it loads the model."""

    @property
    def is_encoder(self) -> bool:
        """Returns whether the engine runs only the model's encoder."""
        return self.ec_transfer is not None and self.ec_transfer.get("ec_role") == "ec_producer"
