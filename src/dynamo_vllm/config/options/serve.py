"""Options of `serve` beside those of the processes it starts."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt

DEMOS = ("chat", "lora", "vision", "image", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Everything on one machine: a frontend and its workers."""

    model: str | None = opt(
        None,
        "what to serve",
        "Folder of the model or its hub id; without one the demo model of the package is served.",
        env="DYN_VLLM_MODEL",
        metavar="MODEL",
    )
    demo: str | None = opt(
        None,
        "what to serve",
        "Which models of the package to serve without a MODEL: chat, chat with its two adapters (lora), "
        "vision, image, or all that this installation can (default: chat).",
        env="DYN_VLLM_DEMO",
        choices=DEMOS,
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
        "Number of workers that only answer, from the KV caches of the prefill workers.",
        env="DYN_VLLM_DECODE_WORKERS",
        metavar="N",
    )
    encode: int | None = opt(
        None,
        "what to serve",
        "Number of workers that only encode media, for the others.",
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
        "Size in MiB at which the log of a process is put aside and begins anew; 0 lets it grow.",
        env="DYN_VLLM_LOG_MB",
        metavar="MIB",
    )
    log_parts: int = opt(
        3,
        "logs",
        "Older parts of each log that stay: worker-1.log.1 is the newest of them.",
        env="DYN_VLLM_LOG_PARTS",
        metavar="N",
    )
    keep_runs: int = opt(
        10,
        "logs",
        "Folders of earlier runs that stay in the user's cache; a folder in use always does.",
        env="DYN_VLLM_KEEP_RUNS",
        metavar="N",
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
        "Times one process is replaced in a row before it is given up: a worker for --retry-seconds while "
        "the others serve on, the frontend or the last worker with serve itself.",
        env="DYN_VLLM_RESTARTS",
        metavar="N",
    )
    retry_seconds: float = opt(
        600.0,
        "what to serve",
        "How long a worker that was given up rests before it is tried again.",
        env="DYN_VLLM_RETRY_SECONDS",
        metavar="SECONDS",
    )
