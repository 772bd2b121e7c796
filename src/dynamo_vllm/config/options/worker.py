"""Options of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.guides import GuideOptions
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
"""Older names of --disaggregation-mode, and the role that each means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(GuideOptions):
    """One worker: what it serves, as which role, and how it lives."""

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
    """Their order in help and docs, in whichever module and class the options of each are declared."""

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
        metavar="TYPE",
    )
    card_port: int | None = opt(
        None,
        "runtime",
        "With --system-port: port where frontends fetch the model's config and tokenizer; unset takes a free "
        "one.",
        env="DYN_VLLM_CARD_PORT",
        metavar="PORT",
    )
    tool_call_parser: str | None = opt(
        None,
        "model",
        "Parser the frontend applies to tool calls; in text mode the worker applies vLLM's of that name.",
        env="DYN_TOOL_CALL_PARSER",
        flags=("--tool-call-parser", "--dyn-tool-call-parser"),
        metavar="NAME",
    )
    reasoning_parser: str | None = opt(
        None,
        "model",
        "Parser the frontend applies to reasoning text, or in text mode the worker; the engine gets it too "
        "where it knows the name.",
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
        "Text mode: the engine tokenises and writes text. The frontend then cannot route by KV.",
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
        "What this worker does of a request (default: agg, everything).",
        env="DYN_DISAGGREGATION_MODE",
        choices=tuple(CARDS),
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
        "Run engines for a worker on another node and serve nothing (docs/data-parallel.md).",
        env="DYN_VLLM_HEADLESS",
    )
    node_peers: tuple[str, ...] = opt(
        (),
        "role",
        "Machines whose nodes may join this worker where there is no --admin-token: addresses, networks as "
        "10.0.0.0/24, or names (default: this machine only). Who joins can end the worker.",
        env="DYN_VLLM_NODE_PEERS",
        metavar="MACHINE",
    )
    connector: tuple[str, ...] = opt(
        (),
        "kv cache",
        "KV connectors in order: nixl, kvbm, or none alone; lmcache is known and refused.",
        env="DYN_CONNECTOR",
        metavar="NAME",
    )
    local_prefill_tokens: int | None = opt(
        None,
        "kv cache",
        "A prefill worker leaves prompts of fewer tokens than this to the decode worker.",
        env="DYN_VLLM_LOCAL_PREFILL_TOKENS",
        metavar="TOKENS",
    )
    kv_lease_seconds: int = opt(
        30,
        "kv cache",
        "How long a prefill worker keeps a KV cache that nobody fetches.",
        env="DYN_VLLM_KV_LEASE_SECONDS",
        metavar="SECONDS",
    )
    kv_offload_gb: float | None = opt(
        None,
        "kv cache",
        "Host memory in GB for KV caches that leave the engine, with kvbm (default: 5); sizes in "
        "their own variables stand.",
        env="DYN_VLLM_KV_OFFLOAD_GB",
        metavar="GB",
    )
    side_channel_host: str | None = opt(
        None,
        "kv cache",
        "Address where other engines ask for KV caches (default: --bind-host, or the machine's own).",
        env="VLLM_NIXL_SIDE_CHANNEL_HOST",
        metavar="ADDRESS",
    )
    side_channel_port: int | None = opt(
        None,
        "kv cache",
        "First port of that, one more per data-parallel rank; unset takes free ones.",
        env="VLLM_NIXL_SIDE_CHANNEL_PORT",
        metavar="PORT",
    )
    engines_here: int | None = opt(
        None,
        "engine",
        "Engines that share this machine, those of other workers too: on a CPU all of them take a quarter of "
        "the free memory for their KV caches, and all cores but one (default: this worker's own; serve "
        "counts its own).",
        env="DYN_VLLM_ENGINES_HERE",
        metavar="N",
    )
    fork: bool = opt(
        True,
        "engine",
        "Fork workers and engine cores from a process that has imported vLLM, which starts them in seconds; "
        "off starts each afresh.",
        env="DYN_VLLM_FORK",
    )
    direct_egress: bool = opt(
        True,
        "engine",
        "Send plain token answers straight from the engine's output, without a queue and a task for each "
        "request; off goes through vLLM's own for everything.",
        env="DYN_VLLM_DIRECT_EGRESS",
    )
    warm_up: bool = opt(
        True,
        "engine",
        "Ask the engine one small request of each kind before it serves, so that no client waits for what is "
        "built with the first; off sends one in all.",
        env="DYN_VLLM_WARM_UP",
    )
    kv_events: bool | None = opt(
        None,
        "kv cache",
        "Publish KV events for the router (default: on when prefix caching is).",
        env="DYN_VLLM_KV_EVENTS",
    )
    kv_event_port: int | None = opt(
        None,
        "kv cache",
        "First port of KV events, one more per data-parallel rank; unset takes a local socket or free ports.",
        env="DYN_VLLM_KV_EVENT_PORT",
        metavar="PORT",
    )
    enable_local_indexer: bool = opt(
        True, "kv cache", "Keep an index of this worker's KV blocks in the worker.", env="DYN_LOCAL_INDEXER"
    )
    enable_prompt_embeds: bool = opt(
        False, "requests", "Accept prompt embeddings.", env="DYN_VLLM_ENABLE_PROMPT_EMBEDS"
    )
    migration_limit: int = opt(
        3,
        "requests",
        "Times a request may move to another worker; the frontend decides, the worker advertises it.",
        env="DYN_MIGRATION_LIMIT",
        metavar="N",
    )
    crash_notes: str | None = opt(
        None,
        "requests",
        "Folder that workers of one machine share, where each notes the requests that have no token yet: one "
        "of which two workers died gets 503 from the third. serve gives its workers one.",
        env="DYN_VLLM_CRASH_NOTES",
        metavar="FOLDER",
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
        "Folder of fetched adapters; several workers may share it. Default: ~/.cache/dynamo-vllm/adapters.",
        env="DYN_LORA_PATH",
        metavar="FOLDER",
    )
    lora_max_gb: float = opt(
        8.0, "lora", "Largest adapter that is taken, in GB.", env="DYN_VLLM_LORA_MAX_GB", metavar="GB"
    )
    admin_token: str | None = admin_token()
    drain_seconds: float = opt(
        30.0,
        "life",
        "Budget for running requests after SIGTERM; what is left then moves to another worker.",
        env="DYN_VLLM_DRAIN_SECONDS",
        metavar="SECONDS",
    )
    unread_mb: float = opt(
        4.0,
        "life",
        "MB of an answer that may wait in the worker while its client does not read; more ends the request.",
        env="DYN_VLLM_UNREAD_MB",
        metavar="MB",
    )
    health_seconds: float = opt(
        2.0, "life", "Seconds between looks at the engine.", env="DYN_VLLM_HEALTH_SECONDS", metavar="SECONDS"
    )
    canary_seconds: float = opt(
        4.0,
        "life",
        "Seconds without output, while work is waiting or idle, before a canary request is sent.",
        env="DYN_VLLM_CANARY_SECONDS",
        metavar="SECONDS",
    )
    canary_timeout_seconds: float = opt(
        6.0,
        "life",
        "Seconds a canary may take before the engine must show that it works; it is hung and out of service "
        "where its process is stopped, or uses neither processor nor GPU for twice as long.",
        env="DYN_VLLM_CANARY_TIMEOUT_SECONDS",
        metavar="SECONDS",
    )
    step_seconds: float = opt(
        600.0,
        "life",
        "Seconds one step of the engine may take; one that takes longer is hung, however busy it is.",
        env="DYN_VLLM_STEP_SECONDS",
        metavar="SECONDS",
    )
    runtime_health_check: bool = opt(
        False,
        "life",
        "Let the runtime probe the endpoint and answer /health, instead of the worker's own watch.",
        env="DYN_HEALTH_CHECK_ENABLED",
    )
    prometheus_multiproc_dir: str | None = opt(
        None,
        "life",
        "Folder of multi-process metrics of this one worker; unset, its own where a connector needs one.",
        env="PROMETHEUS_MULTIPROC_DIR",
        metavar="FOLDER",
    )
    engine: str = opt(
        "vllm",
        "engine",
        "What computes: vllm, or fake for tests and for measuring everything around the engine.",
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
        "Write the resolved configuration to this file, before the start and again with what it brings.",
        env="DYN_VLLM_DUMP_CONFIG_TO",
        metavar="FILE",
    )

    @property
    def role(self) -> str:
        """agg, prefill, decode or encode, from whichever flag named it."""
        older = (role for name, role in OLDER_ROLES.items() if getattr(self, name))
        return next(older, self.disaggregation_mode or "agg")

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
        if self.endpoint and self.endpoint.startswith("dyn://"):
            return self.endpoint.removeprefix("dyn://")
        return f"{self.namespace}.{self.component or self.card.component}.{self.endpoint or 'generate'}"
