"""Options of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynamo_vllm.config import addresses
from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.kv_cache import KvCacheOptions
from dynamo_vllm.config.options.runtime import admin_token
from dynamo_vllm.config.role_cards import CARDS, RoleCard

OLDER_ROLES = {
    "is_prefill_worker": "prefill",
    "is_decode_worker": "decode",
    "multimodal_encode_prefill_worker": "prefill",
    "multimodal_decode_worker": "decode",
    "multimodal_encode_worker": "encode",
    "vllm_native_encoder_worker": "encode",
}
"""Older names of --disaggregation-mode, with the role of each."""
OLDER_MODES = {"pd": "agg"}
"""Older values of --disaggregation-mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(KvCacheOptions):
    """One worker: what it serves, its role, and its life cycle."""

    GROUPS: ClassVar[tuple[str, ...]] = (
        "runtime",
        "traces",
        "model",
        "address",
        "role",
        "multimodal",
        "omni",
        "kv cache",
        "engine",
        "requests",
        "lora",
        "admin",
        "life",
    )
    """The order of the groups in help and docs, whichever module and class declares their options."""

    model: str | None = opt(
        None,
        "model",
        "Folder of the model, or its hub id.",
        env="DYN_VLLM_MODEL",
        metavar="MODEL",
    )
    served_model_name: tuple[str, ...] = opt(
        (),
        "model",
        "Name clients use; further names are aliases. Default: the model as given.",
        env="DYN_VLLM_SERVED_MODEL_NAME",
        metavar="NAME",
    )
    custom_jinja_template: str | None = opt(
        None,
        "model",
        "Chat template file that replaces the model's own.",
        env="DYN_CUSTOM_JINJA_TEMPLATE",
        metavar="FILE",
    )
    endpoint_types: tuple[str, ...] = opt(
        ("chat", "completions"),
        "model",
        "OpenAI endpoints the model answers on: chat, completions.",
        env="DYN_ENDPOINT_TYPES",
        flags=("--endpoint-types", "--dyn-endpoint-types"),
        metavar="TYPE",
    )
    card_port: int | None = opt(
        None,
        "runtime",
        "Port where frontends fetch the model's config and tokenizer, with --system-port (default: a free"
        " one).",
        env="DYN_VLLM_CARD_PORT",
        metavar="PORT",
    )
    tool_call_parser: str | None = opt(
        None,
        "model",
        "Parser the frontend applies to tool calls; in text mode the worker uses vLLM's parser of that name.",
        env="DYN_TOOL_CALL_PARSER",
        flags=("--tool-call-parser", "--dyn-tool-call-parser"),
        metavar="NAME",
    )
    reasoning_parser: str | None = opt(
        None,
        "model",
        "Parser the frontend applies to reasoning text; in text mode the worker uses vLLM's. The engine "
        "gets it too if it knows the name.",
        env="DYN_REASONING_PARSER",
        flags=("--reasoning-parser", "--dyn-reasoning-parser"),
        metavar="NAME",
    )
    exclude_tools_when_tool_choice_none: bool = opt(
        True,
        "model",
        "Leave tool definitions out of the prompt when tool_choice is none.",
        env="DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
    )
    use_vllm_tokenizer: bool = opt(
        False,
        "model",
        "Text mode: the worker tokenises and returns text. The frontend then cannot route by KV cache.",
        env="DYN_VLLM_USE_TOKENIZER",
    )
    component: str | None = opt(
        None,
        "address",
        "Component name; the default follows the role.",
        env="DYN_COMPONENT",
        metavar="NAME",
    )
    endpoint: str | None = opt(
        None,
        "address",
        "Endpoint name, or a whole address dyn://namespace.component.endpoint.",
        env="DYN_ENDPOINT",
        metavar="NAME",
    )
    disaggregation_mode: str | None = opt(
        None,
        "role",
        "Part of a request that this worker computes (default: agg, everything; pd is an older name of it). "
        "pooling and transcription follow from the model: embeddings, scores and classes, or text of speech.",
        env="DYN_DISAGGREGATION_MODE",
        choices=(*CARDS, *OLDER_MODES),
        older_envs=("DYN_VLLM_DISAGGREGATION_MODE",),
    )
    is_prefill_worker: bool = opt(
        False, "role", "Older name of --disaggregation-mode prefill.", env="DYN_VLLM_IS_PREFILL_WORKER"
    )
    is_decode_worker: bool = opt(
        False, "role", "Older name of --disaggregation-mode decode.", env="DYN_VLLM_IS_DECODE_WORKER"
    )
    headless: bool = opt(
        False,
        "role",
        "Run engines for a worker on another node and serve no endpoint (docs/data-parallel.md).",
        env="DYN_VLLM_HEADLESS",
    )
    node_peers: tuple[str, ...] = opt(
        (),
        "role",
        "Machines whose nodes may join this worker without an --admin-token: addresses, networks such as "
        "10.0.0.0/24, or names (default: this machine only). A node that joins can end the worker.",
        env="DYN_VLLM_NODE_PEERS",
        metavar="MACHINE",
    )
    engines_here: int | None = opt(
        None,
        "engine",
        "Number of engines on this machine, including those of other workers. On a CPU they share a "
        "quarter of the free memory for KV caches, and all cores but one (default: this worker's engines;"
        " serve counts its own).",
        env="DYN_VLLM_ENGINES_HERE",
        metavar="N",
    )
    fork: bool = opt(
        True,
        "engine",
        "Fork workers and engine cores from a process that has imported vLLM, so that they start in "
        "seconds; --no-fork starts each from scratch.",
        env="DYN_VLLM_FORK",
    )
    direct_egress: bool = opt(
        True,
        "engine",
        "Send plain token answers directly from the engine's output handler, without a queue and a task "
        "per request; --no-direct-egress uses vLLM's own path for everything.",
        env="DYN_VLLM_DIRECT_EGRESS",
    )
    warm_up: bool = opt(
        True,
        "engine",
        "Send the engine one small request of each kind before it serves, so that no client waits for "
        "what vLLM builds on first use; --no-warm-up sends only one request.",
        env="DYN_VLLM_WARM_UP",
    )
    lora_enabled: bool = opt(
        False,
        "lora",
        "Load and unload adapters at run time; vLLM's --enable-lora does the same.",
        env="DYN_LORA_ENABLED",
    )
    lora_modules: tuple[str, ...] = opt(
        (),
        "lora",
        "Adapters to load before the worker is ready, as NAME=URI.",
        env="DYN_VLLM_LORA_MODULES",
        metavar="NAME=URI",
    )
    lora_path: str | None = opt(
        None,
        "lora",
        "Folder for downloaded adapters; several workers may share it. Default: ~/.cache/dynamo-"
        "vllm/adapters.",
        env="DYN_LORA_PATH",
        metavar="FOLDER",
    )
    lora_max_gb: float = opt(
        8.0, "lora", "Largest adapter that is accepted, in GB.", env="DYN_VLLM_LORA_MAX_GB", metavar="GB"
    )
    admin_token: str | None = admin_token()
    drain_seconds: float = opt(
        30.0,
        "life",
        "Time for running requests after SIGTERM; the rest then moves to another worker.",
        env="DYN_VLLM_DRAIN_SECONDS",
        metavar="SECONDS",
    )
    unread_mb: float = opt(
        4.0,
        "life",
        "Megabytes of an answer that may wait in the worker while its client does not read; above that "
        "the request ends.",
        env="DYN_VLLM_UNREAD_MB",
        metavar="MB",
    )
    messages_per_second: int = opt(
        10_000,
        "life",
        "Messages that all streams of a worker send per second before the tokens of a stream travel together "
        "(0 = a message for each token). First and last tokens never wait, others at most 50 ms.",
        env="DYN_VLLM_MESSAGES_PER_SECOND",
        metavar="N",
    )
    health_seconds: float = opt(
        2.0, "life", "Seconds between checks of the engine.", env="DYN_VLLM_HEALTH_SECONDS", metavar="SECONDS"
    )
    canary_seconds: float = opt(
        4.0,
        "life",
        "Seconds without output, busy or idle, before the worker sends the engine a canary request.",
        env="DYN_VLLM_CANARY_SECONDS",
        metavar="SECONDS",
    )
    canary_timeout_seconds: float = opt(
        6.0,
        "life",
        "Seconds a canary may take before the worker inspects the engine's processes. The engine is hung,"
        " and leaves service, if they are stopped, or use neither CPU nor GPU for twice as long.",
        env="DYN_VLLM_CANARY_TIMEOUT_SECONDS",
        metavar="SECONDS",
    )
    step_seconds: float = opt(
        600.0,
        "life",
        "Longest step of the engine; after that it counts as hung, however busy it is.",
        env="DYN_VLLM_STEP_SECONDS",
        metavar="SECONDS",
    )
    runtime_health_check: bool = opt(
        False,
        "life",
        "Let the runtime probe the endpoint and answer /health, instead of the worker's own check.",
        env="DYN_HEALTH_CHECK_ENABLED",
    )
    prometheus_multiproc_dir: str | None = opt(
        None,
        "life",
        "Folder for multi-process metrics, in which each worker makes one of its own while it runs (default: "
        "in the temporary folder, if a connector needs one).",
        env="PROMETHEUS_MULTIPROC_DIR",
        metavar="FOLDER",
    )
    engine: str = opt(
        "vllm",
        "engine",
        "The engine: vllm, or fake for tests and for measuring the request path without a model.",
        env="DYN_VLLM_ENGINE",
        choices=("vllm", "fake"),
    )
    fake_engine: str | None = opt(
        None,
        "engine",
        'Behaviour of the fake engine, e.g. {"token_ms": 5, "die_after": 100}.',
        env="DYN_VLLM_FAKE_ENGINE",
        metavar="JSON",
    )
    dump_config_to: str | None = opt(
        None,
        "engine",
        "Write the resolved configuration to this file, before the start and again when the engine is ready.",
        env="DYN_VLLM_DUMP_CONFIG_TO",
        older_envs=("DYN_DUMP_CONFIG_TO",),
        metavar="FILE",
    )

    @property
    def role(self) -> str:
        """A name in CARDS, from whichever flag named it."""
        mode = self.disaggregation_mode or "agg"
        return next(iter(self.older_roles.values()), OLDER_MODES.get(mode, mode))

    @property
    def older_roles(self) -> dict[str, str]:
        """The role of each option that is an older name of --disaggregation-mode and is given."""
        return {name: role for name, role in OLDER_ROLES.items() if getattr(self, name)}

    @property
    def card(self) -> RoleCard:
        """What the role is, whatever its name."""
        return CARDS[self.role]

    @property
    def asks_encoders(self) -> bool:
        """Whether media go to encode workers first."""
        wanted = self.route_to_encoder or self.multimodal_worker or self.ec_consumer_mode
        return wanted and not self.card.encodes_media

    @property
    def address(self) -> str:
        """namespace.component.endpoint."""
        own = f"{self.namespace}.{self.component or self.card.component}.{self.endpoint or 'generate'}"
        return addresses.whole(self.endpoint) or own
