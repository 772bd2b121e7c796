"""Every option once: type, default, environment variable, flag names, help."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt

DISCOVERY_BACKENDS = ("file", "mem", "etcd", "kubernetes")
ROUTERS = (
    "kv",
    "round-robin",
    "random",
    "power-of-two",
    "least-loaded",
    "direct",
    "device-aware-weighted",
)
ROLES = ("agg", "prefill", "decode", "encode")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """How a process finds and reaches the others."""

    namespace: str = opt("dynamo", "runtime", "Namespace of the deployment.", env="DYN_NAMESPACE")
    discovery_backend: str = opt(
        "file",
        "runtime",
        "Where workers and frontends find each other: file and mem need no service.",
        env="DYN_DISCOVERY_BACKEND",
        flags=("--discovery-backend", "--store-kv"),
        choices=DISCOVERY_BACKENDS,
    )
    file_kv: str | None = opt(
        None,
        "runtime",
        "Folder of the file discovery backend; shared by every process of a deployment on one machine.",
        env="DYN_FILE_KV",
        metavar="FOLDER",
    )
    request_plane: str = opt(
        "tcp",
        "runtime",
        "Transport of requests.",
        env="DYN_REQUEST_PLANE",
        choices=("tcp", "nats"),
    )
    event_plane: str = opt(
        "zmq",
        "runtime",
        "Transport of KV events and load figures.",
        env="DYN_EVENT_PLANE",
        choices=("zmq", "nats"),
    )
    bind_host: str | None = opt(
        None,
        "runtime",
        "Address this process binds and advertises; 127.0.0.1 keeps all traffic on this machine. "
        "Unset: the machine's own address.",
        env="DYN_VLLM_BIND_HOST",
        metavar="ADDRESS",
    )
    system_host: str | None = opt(
        None, "runtime", "Address of the health and metrics server.", env="DYN_SYSTEM_HOST", metavar="ADDRESS"
    )
    system_port: int | None = opt(
        None,
        "runtime",
        "Port of /health, /live and /metrics; 0 takes a free one, unset serves none.",
        env="DYN_SYSTEM_PORT",
        metavar="PORT",
    )
    log_level: str = opt(
        "info",
        "runtime",
        "How much to log.",
        env="DYN_VLLM_LOG_LEVEL",
        choices=("error", "warning", "info", "debug"),
    )
    status_fd: int | None = opt(
        None,
        "runtime",
        "File descriptor that gets one JSON line per phase of the start.",
        env="DYN_VLLM_STATUS_FD",
        metavar="FD",
        hidden=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(RuntimeOptions):
    """One worker: what it serves, as which role, and how it lives."""

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
    tool_call_parser: str | None = opt(
        None,
        "model",
        "Parser the frontend applies to tool calls.",
        env="DYN_TOOL_CALL_PARSER",
        flags=("--tool-call-parser", "--dyn-tool-call-parser"),
        metavar="NAME",
    )
    reasoning_parser: str | None = opt(
        None,
        "model",
        "Parser the frontend applies to reasoning text; the engine gets it too where it knows the name.",
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
        choices=ROLES,
    )
    is_prefill_worker: bool = opt(
        False, "role", "Older name of --disaggregation-mode prefill.", env="DYN_VLLM_IS_PREFILL_WORKER"
    )
    is_decode_worker: bool = opt(
        False, "role", "Older name of --disaggregation-mode decode.", env="DYN_VLLM_IS_DECODE_WORKER"
    )
    enable_multimodal: bool = opt(
        False, "multimodal", "Accept images and video.", env="DYN_VLLM_ENABLE_MULTIMODAL"
    )
    multimodal_worker: bool = opt(
        False, "multimodal", "Prefill and decode behind an encoder.", env="DYN_VLLM_MULTIMODAL_WORKER"
    )
    multimodal_encode_worker: bool = opt(
        False, "multimodal", "Encoder only.", env="DYN_VLLM_MULTIMODAL_ENCODE_WORKER"
    )
    multimodal_decode_worker: bool = opt(
        False, "multimodal", "Decode behind encoder and prefill.", env="DYN_VLLM_MULTIMODAL_DECODE_WORKER"
    )
    multimodal_encode_prefill_worker: bool = opt(
        False, "multimodal", "Encoder and prefill in one.", env="DYN_VLLM_MULTIMODAL_ENCODE_PREFILL_WORKER"
    )
    multimodal_processor: bool = opt(
        False, "multimodal", "Processor in front of encoder workers.", env="DYN_VLLM_MULTIMODAL_PROCESSOR"
    )
    ec_processor: bool = opt(
        False, "multimodal", "Processor in front of native encoders.", env="DYN_VLLM_EC_PROCESSOR"
    )
    route_to_encoder: bool = opt(
        False, "multimodal", "Send media to separate encoder workers.", env="DYN_ROUTE_TO_ENCODER"
    )
    vllm_native_encoder_worker: bool = opt(
        False,
        "multimodal",
        "Encoder through vLLM's encoder cache connector.",
        env="DYN_VLLM_NATIVE_ENCODER_WORKER",
    )
    ec_connector_backend: str | None = opt(
        None, "multimodal", "Encoder cache connector.", env="DYN_VLLM_EC_CONNECTOR_BACKEND", metavar="NAME"
    )
    ec_storage_path: str | None = opt(
        None, "multimodal", "Folder of ECExampleConnector.", env="DYN_VLLM_EC_STORAGE_PATH", metavar="FOLDER"
    )
    ec_extra_config: str | None = opt(
        None, "multimodal", "Further connector settings.", env="DYN_VLLM_EC_EXTRA_CONFIG", metavar="JSON"
    )
    ec_consumer_mode: bool = opt(
        False, "multimodal", "Take embeddings from the encoder cache.", env="DYN_VLLM_EC_CONSUMER_MODE"
    )
    frontend_decoding: bool = opt(
        False, "multimodal", "Decode media in the Rust frontend.", env="DYN_VLLM_FRONTEND_DECODING"
    )
    mm_prompt_template: str | None = opt(
        None, "multimodal", "Prompt template around media.", env="DYN_VLLM_MM_PROMPT_TEMPLATE", metavar="TEXT"
    )
    omni: bool = opt(False, "omni", "Run vLLM-Omni instead of vLLM.", env="DYN_VLLM_OMNI")
    stage_configs_path: str | None = opt(
        None,
        "omni",
        "Stages of the pipeline; optional.",
        env="DYN_VLLM_STAGE_CONFIGS_PATH",
        metavar="FILE",
    )
    connector: tuple[str, ...] = opt(
        (),
        "kv cache",
        "KV connectors in order: nixl, lmcache, kvbm, or none alone.",
        env="DYN_CONNECTOR",
        metavar="NAME",
    )
    kv_lease_seconds: int = opt(
        30,
        "kv cache",
        "How long a prefill worker keeps a KV cache that nobody fetches.",
        env="DYN_VLLM_KV_LEASE_SECONDS",
        metavar="SECONDS",
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
    lora_enabled: bool = opt(False, "lora", "Load and unload adapters at run time.", env="DYN_LORA_ENABLED")
    lora_path: str | None = opt(
        None, "lora", "Folder of fetched adapters.", env="DYN_LORA_PATH", metavar="FOLDER"
    )
    drain_seconds: float = opt(
        30.0,
        "life",
        "Budget for running requests after SIGTERM; what is left then moves to another worker.",
        env="DYN_VLLM_DRAIN_SECONDS",
        metavar="SECONDS",
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
        "Seconds a canary may take before the worker is taken out of service.",
        env="DYN_VLLM_CANARY_TIMEOUT_SECONDS",
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
        "Folder of multi-process metrics of this one worker; unset, each process keeps its own.",
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
        "Write the resolved configuration to this file.",
        env="DYN_VLLM_DUMP_CONFIG_TO",
        metavar="FILE",
    )

    @property
    def role(self) -> str:
        """agg, prefill, decode or encode, from whichever flag named it."""
        if self.is_prefill_worker:
            return "prefill"
        if self.is_decode_worker:
            return "decode"
        return self.disaggregation_mode or "agg"

    @property
    def address(self) -> str:
        """namespace.component.endpoint."""
        if self.endpoint and self.endpoint.startswith("dyn://"):
            return self.endpoint.removeprefix("dyn://")
        component = self.component or {"prefill": "prefill", "encode": "encoder"}.get(self.role, "backend")
        return f"{self.namespace}.{component}.{self.endpoint or 'generate'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions(RuntimeOptions):
    """The OpenAI server and its router."""

    host: str = opt(
        "127.0.0.1",
        "http",
        "Address to listen on; 0.0.0.0 for every interface.",
        env="DYN_HTTP_HOST",
        flags=("--host", "--http-host"),
        metavar="ADDRESS",
    )
    port: int = opt(
        8000,
        "http",
        "Port to listen on.",
        env="DYN_HTTP_PORT",
        flags=("--port", "--http-port"),
        metavar="PORT",
    )
    tls_cert_path: str | None = opt(
        None, "http", "TLS certificate (PEM).", env="DYN_TLS_CERT_PATH", metavar="FILE"
    )
    tls_key_path: str | None = opt(None, "http", "TLS key (PEM).", env="DYN_TLS_KEY_PATH", metavar="FILE")
    max_body_mb: int = opt(
        45, "http", "Largest request body in MiB.", env="DYN_HTTP_BODY_LIMIT_MB", metavar="MIB"
    )
    error_wait_ms: int = opt(
        5000,
        "http",
        "How long a streamed answer waits for its first token before the HTTP status is sent, so that an "
        "early error keeps its status; 0 sends 200 at once.",
        env="DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS",
        metavar="MS",
    )
    metrics_prefix: str | None = opt(
        None, "http", "Prefix of the frontend's metrics.", env="DYN_METRICS_PREFIX", metavar="NAME"
    )
    namespace_prefix: str | None = opt(
        None,
        "http",
        "Serve models of every namespace with this prefix.",
        env="DYN_NAMESPACE_PREFIX",
        metavar="NAME",
    )
    router: str = opt(
        "kv",
        "router",
        "How a worker is chosen.",
        env="DYN_ROUTER_MODE",
        flags=("--router", "--router-mode"),
        choices=ROUTERS,
    )
    router_temperature: float = opt(
        0.0, "router", "0 always takes the best worker; above, it is sampled.", env="DYN_ROUTER_TEMPERATURE"
    )
    kv_overlap_weight: float = opt(
        1.0,
        "router",
        "Weight of cached prefix against load in the KV router.",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        flags=("--kv-overlap-weight", "--kv-overlap-score-weight"),
    )
    use_kv_events: bool = opt(
        True,
        "router",
        "Follow the workers' KV events; off predicts the caches from past choices.",
        env="DYN_ROUTER_USE_KV_EVENTS",
        flags=("--use-kv-events", "--kv-events"),
    )
    router_ttl_seconds: float = opt(
        120.0, "router", "Life of a predicted block when events are off.", env="DYN_ROUTER_TTL_SECS"
    )
    router_replica_sync: bool = opt(
        False, "router", "Share the router's state between several frontends.", env="DYN_ROUTER_REPLICA_SYNC"
    )
    router_track_output_blocks: bool = opt(
        False, "router", "Count generated blocks as load too.", env="DYN_ROUTER_TRACK_OUTPUT_BLOCKS"
    )
    router_queue_threshold: float | None = opt(
        None,
        "router",
        "Queue requests when every worker's prefill load exceeds this share of its batch.",
        env="DYN_ROUTER_QUEUE_THRESHOLD",
    )
    busy_blocks: float | None = opt(
        None,
        "router",
        "Refuse (503) when the KV use of every worker exceeds this share.",
        env="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        flags=("--busy-blocks", "--active-decode-blocks-threshold"),
    )
    busy_prefill_tokens: int | None = opt(
        None,
        "router",
        "Refuse (503) when every worker has more prompt tokens waiting than this.",
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
        flags=("--busy-prefill-tokens", "--active-prefill-tokens-threshold"),
    )
    migration_limit: int = opt(
        3,
        "migration",
        "Times a request may move to another worker when its own goes away; 0 turns it off.",
        env="DYN_MIGRATION_LIMIT",
        metavar="N",
    )
    migration_max_seq_len: int | None = opt(
        None,
        "migration",
        "Longest sequence that is still moved.",
        env="DYN_MIGRATION_MAX_SEQ_LEN",
        metavar="TOKENS",
    )
    drain_seconds: float = opt(
        30.0,
        "life",
        "Budget for open requests after SIGTERM.",
        env="DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Everything on one machine: a frontend and its workers."""

    model: str | None = opt(
        None,
        "what to serve",
        "Folder of the model or its hub id; without one a tiny demo model is made on the spot.",
        env="DYN_VLLM_MODEL",
        metavar="MODEL",
    )
    config: str | None = opt(
        None,
        "what to serve",
        "YAML file that describes the frontend and groups of workers.",
        env="DYN_VLLM_SERVE_CONFIG",
        metavar="FILE",
    )
    workers: int = opt(1, "what to serve", "Number of workers.", env="DYN_VLLM_WORKERS", metavar="N")
    run_dir: str | None = opt(
        None,
        "what to serve",
        "Folder for logs and discovery (default: a new one under the user's cache).",
        env="DYN_VLLM_RUN_DIR",
        metavar="FOLDER",
    )
    start_seconds: float = opt(
        600.0,
        "what to serve",
        "How long the start may take before it counts as failed.",
        env="DYN_VLLM_START_SECONDS",
        metavar="SECONDS",
    )
    restarts: int = opt(
        10,
        "what to serve",
        "Times one process is replaced in a row before serve gives up.",
        env="DYN_VLLM_RESTARTS",
        metavar="N",
    )
