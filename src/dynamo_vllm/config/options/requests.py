"""Options of a worker for requests: what it accepts, and when a request moves or is refused."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.omni import OmniOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions(OmniOptions):
    """A process that answers requests."""

    guide_seconds: float = opt(
        2.0,
        "requests",
        "CPU time for compiling the schema, regex or grammar of a request; above that it gets a 400.",
        env="DYN_VLLM_GUIDE_SECONDS",
        metavar="SECONDS",
    )
    guide_memory_mb: int = opt(
        512,
        "requests",
        "Memory for compiling it; above that the request gets a 400.",
        env="DYN_VLLM_GUIDE_MEMORY_MB",
        metavar="MB",
    )
    enable_prompt_embeds: bool = opt(
        False, "requests", "Accept prompt embeddings.", env="DYN_VLLM_ENABLE_PROMPT_EMBEDS"
    )
    max_items: int = opt(
        2048,
        "requests",
        "Texts in one request for embeddings or classes, and documents in one for scores; more get a 400.",
        env="DYN_VLLM_MAX_ITEMS",
        metavar="N",
    )
    max_speech_seconds: float = opt(
        7200.0,
        "requests",
        "Longest sound to transcribe, in place of --media-max-seconds; longer ones get a 413. An hour takes "
        "up to 690 MB until it is transcribed.",
        env="DYN_VLLM_MAX_SPEECH_SECONDS",
        metavar="SECONDS",
    )
    migration_limit: int = opt(
        3,
        "requests",
        "Times a request may move to another worker; the worker publishes this for the frontend.",
        env="DYN_MIGRATION_LIMIT",
        metavar="N",
    )
    usage_dir: str | None = opt(
        None,
        "requests",
        "Folder for token counts that no gateway has taken yet, so that a killed worker loses none; the "
        "next worker "
        "of this machine sends them (default: in the user's data folder).",
        env="DYN_VLLM_USAGE_DIR",
        metavar="FOLDER",
    )
    crash_notes: str | None = opt(
        None,
        "requests",
        "Folder that workers of one machine share to record requests without a first token. After such a "
        "request has crashed two workers, the third answers 503. serve sets it.",
        env="DYN_VLLM_CRASH_NOTES",
        metavar="FOLDER",
    )
