"""Options of the frontend."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.media_reach import MediaReachOptions

ROUTERS = (
    "kv",
    "round-robin",
    "random",
    "power-of-two",
    "least-loaded",
    "direct",
    "device-aware-weighted",
)
KNOWS_ADAPTERS = ("kv", "round-robin", "random")
"""The routers that send a request for a LoRA adapter only to workers that have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions(MediaReachOptions):
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
        "How long a stream waits for its first token before the HTTP status is sent, so that an early "
        "error has its status; 0 sends 200 at once.",
        env="DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS",
        metavar="MS",
    )
    metrics_prefix: str | None = opt(
        None, "http", "Prefix of the frontend's metrics.", env="DYN_METRICS_PREFIX", metavar="NAME"
    )
    anthropic_api: bool = opt(
        True,
        "http",
        "Serve Anthropic's Messages API too: /v1/messages and /v1/messages/count_tokens.",
        env="DYN_ENABLE_ANTHROPIC_API",
        flags=("--anthropic-api", "--enable-anthropic-api"),
    )
    ignore_unknown_fields: bool = opt(
        False,
        "http",
        "Drop fields of a chat or completion request that the frontend does not know, instead of "
        "answering 400.",
        env="DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS",
    )
    keep_alive_ms: int = opt(
        0,
        "http",
        "Send a comment in a stream that had no token for this long, for proxies that close quiet "
        "connections; 0 leaves it to the frontend, which sends comments only while it holds text back.",
        env="DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS",
        metavar="MS",
    )
    frontend_admin_api: bool = opt(
        False,
        "http",
        "Open /busy_threshold, with which anyone who reaches the port can read and set the load above "
        "which requests are refused, without a token.",
        env="DYN_VLLM_FRONTEND_ADMIN_API",
    )
    lora_enabled: bool | None = opt(
        None,
        "router",
        "Send requests for a LoRA adapter only to workers that have it (default: on with --router kv, "
        "round-robin and random; the others cannot).",
        env="DYN_LORA_ENABLED",
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
        "How the router chooses a worker.",
        env="DYN_ROUTER_MODE",
        flags=("--router", "--router-mode"),
        choices=ROUTERS,
    )
    router_temperature: float = opt(
        0.0,
        "router",
        "0 always takes the best worker; above 0 the router samples.",
        env="DYN_ROUTER_TEMPERATURE",
    )
    kv_overlap_weight: float = opt(
        16.0,
        "router",
        "Weight of the prompt tokens that a worker would have to compute, against the answers it is "
        "generating: a cached prefix counts for more with a higher one.",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        flags=("--kv-overlap-weight", "--kv-overlap-score-weight", "--router-prefill-load-scale"),
    )
    kv_overlap_credit: float = opt(
        1.5,
        "router",
        "How many tokens to compute a cached token makes up for.",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        flags=("--kv-overlap-credit", "--router-kv-overlap-score-credit"),
    )
    router_host_cache_weight: float = opt(
        0.75,
        "router",
        "How many tokens to compute a token makes up for that a worker has in host memory "
        "(--kv-offload-gb), from 0 to 1.",
        env="DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        flags=("--router-host-cache-weight", "--router-host-cache-hit-weight"),
    )
    router_disk_cache_weight: float = opt(
        0.25,
        "router",
        "The same for a token that a worker has on disk (--kv-offload-disk).",
        env="DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
        flags=("--router-disk-cache-weight", "--router-disk-cache-hit-weight"),
    )
    router_request_blocks: float = opt(
        256.0,
        "router",
        "How many KV blocks a running request counts as, beside its own: it keeps one prefix that everybody "
        "shares from gathering all requests on one worker.",
        env="DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
        flags=("--router-request-blocks", "--router-decode-active-request-weight"),
        metavar="BLOCKS",
    )
    use_kv_events: bool = opt(
        True,
        "router",
        "Follow the workers' KV events; --no-use-kv-events predicts the caches from past choices.",
        env="DYN_ROUTER_USE_KV_EVENTS",
        flags=("--use-kv-events", "--kv-events"),
    )
    router_ttl_seconds: float = opt(
        120.0, "router", "Lifetime of a predicted block without KV events.", env="DYN_ROUTER_TTL_SECS"
    )
    local_prefill_tokens: int | None = opt(
        None,
        "router",
        "Let a decode worker that has the prefix of a prompt cached compute the rest itself, if that has "
        "fewer tokens than this. Decode workers must publish KV events (--kv-events; serve sets it). For "
        "short prompts that no worker has cached, prefill workers have an option of the same name.",
        env="DYN_VLLM_LOCAL_PREFILL_TOKENS",
        metavar="TOKENS",
    )
    router_replica_sync: bool = opt(
        False, "router", "Share the router's state between several frontends.", env="DYN_ROUTER_REPLICA_SYNC"
    )
    router_track_output_blocks: bool = opt(
        False, "router", "Count generated blocks as load too.", env="DYN_ROUTER_TRACK_OUTPUT_BLOCKS"
    )
    router_queue_seconds: float = opt(
        0.5,
        "router",
        "Hold requests back while every worker has prompts to compute for longer than this; 0 sends every "
        "request at once. Workers time their engine when they start; for one that did not, a second stands "
        "for one batch (max_num_batched_tokens). Off with --busy-prefill-tokens, which refuses instead.",
        env="DYN_ROUTER_QUEUE_THRESHOLD",
        flags=("--router-queue-seconds", "--router-queue-threshold"),
        metavar="SECONDS",
    )
    router_queue_policy: str = opt(
        "wspt",
        "router",
        "Order of the requests that --router-queue-seconds holds back. fcfs: first come, first served."
        " wspt: fewest prompt tokens left to compute first, for short waits on average.",
        env="DYN_ROUTER_QUEUE_POLICY",
        choices=("fcfs", "wspt"),
    )
    busy_blocks: float | None = opt(
        None,
        "router",
        "Admission control: answer 529 when the KV use of every worker exceeds this share.",
        env="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        flags=("--busy-blocks", "--active-decode-blocks-threshold"),
    )
    busy_prefill_tokens: int | None = opt(
        None,
        "router",
        "Admission control: answer 529 when every worker has more waiting prompt tokens than this.",
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
        flags=("--busy-prefill-tokens", "--active-prefill-tokens-threshold"),
    )
    unreachable_seconds: int = opt(
        3,
        "router",
        "How long a worker gets no requests after one could not be sent to it.",
        env="DYN_RUNTIME_INHIBITED_DURATION_SECS",
        metavar="SECONDS",
    )
    request_trace_url: str | None = opt(
        None,
        "traces",
        "Send the console a record of each ended request here: times, numbers of tokens, workers, hashes of "
        "blocks, no text. serve sets it. Not with --otlp-endpoint: the runtime sends its log lines to the "
        "same receiver.",
        env="DYN_VLLM_REQUEST_TRACE_URL",
        metavar="URL",
        secret=True,
    )
    migration_limit: int = opt(
        3,
        "migration",
        "Times a request may move to another worker when its own leaves; 0 turns it off.",
        env="DYN_MIGRATION_LIMIT",
        metavar="N",
    )
    migration_max_seq_len: int | None = opt(
        None,
        "migration",
        "Longest sequence that may move.",
        env="DYN_MIGRATION_MAX_SEQ_LEN",
        metavar="TOKENS",
    )
    drain_seconds: float = opt(
        30.0,
        "life",
        "Time for open requests after SIGTERM.",
        env="DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        metavar="SECONDS",
    )
