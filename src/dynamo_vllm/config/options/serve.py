"""Options of `serve` itself; the processes it starts have their own."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt

DEMOS = ("chat", "lora", "vision", "image", "search", "speech", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Everything on one machine: a frontend and its workers."""

    model: str | None = opt(
        None,
        "what to serve",
        "Folder of the model or its hub id (default: the demo model of the package).",
        env="DYN_VLLM_MODEL",
        metavar="MODEL",
    )
    demo: str | None = opt(
        None,
        "what to serve",
        "Models of the package to serve without a MODEL: chat, chat with two adapters (lora), vision, "
        "image, chat with embeddings and reranking (search), speech, or all that this installation supports "
        "(default: chat).",
        env="DYN_VLLM_DEMO",
        choices=DEMOS,
    )
    gateway: bool | None = opt(
        None,
        "gateway",
        "Put a gateway in front: API keys, limits, usage, TLS (default: on with --api-key, and with a "
        "--host that "
        "other machines can reach; without keys for a model that scores pairs of texts or transcribes).",
        env="DYN_VLLM_GATEWAY",
    )
    open: bool = opt(
        False,
        "gateway",
        "Let anyone who can reach --host use everything without a key; without the gateway, unless "
        "--gateway is given too.",
        env="DYN_VLLM_OPEN",
    )
    console: bool = opt(
        True,
        "console",
        "Start a web console beside it: a page on loopback that shows, tries and operates the deployment.",
        env="DYN_VLLM_CONSOLE",
    )
    gateway_console: bool = opt(
        False,
        "console",
        "Let the web console be reached through the gateway too, at /console/. One logs in, also on "
        "loopback: with a key that has --admin, or with --admin-token.",
        env="DYN_VLLM_GATEWAY_CONSOLE",
    )
    config: str | None = opt(
        None,
        "what to serve",
        "YAML file that describes the frontend and groups of workers.",
        env="DYN_VLLM_SERVE_CONFIG",
        metavar="FILE",
    )
    workers: int | None = opt(
        None, "what to serve", "Number of workers (default: 1).", env="DYN_VLLM_WORKERS", metavar="N"
    )
    prefill: int | None = opt(
        None,
        "what to serve",
        "Number of workers that only compute prompts; with --decode, instead of --workers.",
        env="DYN_VLLM_PREFILL_WORKERS",
        metavar="N",
    )
    decode: int | None = opt(
        None,
        "what to serve",
        "Number of workers that only generate answers, from the KV caches of the prefill workers.",
        env="DYN_VLLM_DECODE_WORKERS",
        metavar="N",
    )
    encode: int | None = opt(
        None,
        "what to serve",
        "Number of encode workers, which run the vision encoder for the others.",
        env="DYN_VLLM_ENCODE_WORKERS",
        metavar="N",
    )
    run_dir: str | None = opt(
        None,
        "what to serve",
        "Folder for logs and discovery (default: a new one under the user's cache).",
        env="DYN_VLLM_RUN_DIR",
        metavar="FOLDER",
    )
    log_mb: float = opt(
        50.0,
        "logs",
        "Size in MiB at which the log of a process is rotated; 0 lets it grow.",
        env="DYN_VLLM_LOG_MB",
        metavar="MIB",
    )
    log_parts: int = opt(
        3,
        "logs",
        "Number of rotated parts to keep of each log; worker-1.log.1 is the newest.",
        env="DYN_VLLM_LOG_PARTS",
        metavar="N",
    )
    keep_runs: int = opt(
        10,
        "logs",
        "Number of run folders to keep in the user's cache; folders in use are always kept.",
        env="DYN_VLLM_KEEP_RUNS",
        metavar="N",
    )
    start_seconds: float = opt(
        600.0,
        "what to serve",
        "How long the start may take before it fails.",
        env="DYN_VLLM_START_SECONDS",
        metavar="SECONDS",
    )
    hang_seconds: float = opt(
        30.0,
        "what to serve",
        "How long a process may not answer its health check before serve replaces it.",
        env="DYN_VLLM_HANG_SECONDS",
        metavar="SECONDS",
    )
    unwell_seconds: float = opt(
        120.0,
        "what to serve",
        "How long a process may answer that it is unwell, as with a hung engine, before serve replaces it.",
        env="DYN_VLLM_UNWELL_SECONDS",
        metavar="SECONDS",
    )
    restarts: int = opt(
        10,
        "what to serve",
        "Times one process is restarted in a row before serve gives it up: a worker for --retry-seconds "
        "while the others serve; for the frontend or the last worker serve itself exits.",
        env="DYN_VLLM_RESTARTS",
        metavar="N",
    )
    retry_seconds: float = opt(
        600.0,
        "what to serve",
        "How long serve waits before it tries a worker again that it gave up.",
        env="DYN_VLLM_RETRY_SECONDS",
        metavar="SECONDS",
    )
