"""Options of the commands that call workers: the admin verbs, and what `status` shares with them."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.runtime import ReachOptions, admin_token

CACHES = ("prefix", "multimodal", "encoder")
SLEEP_LEVELS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindOptions(ReachOptions):
    """Which deployment to use."""

    run_dir: str | None = opt(
        None,
        "deployment",
        "Run folder of the serve to use (default: the only one on this machine).",
        env="DYN_VLLM_RUN_DIR",
        metavar="FOLDER",
    )
    admin_token: str | None = admin_token()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminOptions(FindOptions):
    """Which workers to call, and how to print their replies."""

    worker: str | None = opt(
        None,
        "workers",
        "One worker: its number in 'dynamo-vllm status', or the first letters of its instance.",
        env="DYN_VLLM_ADMIN_WORKER",
        metavar="ID",
    )
    all: bool = opt(False, "workers", "Every worker.", env="DYN_VLLM_ADMIN_ALL")
    timeout: float | None = opt(
        None,
        "workers",
        "Seconds to wait for an answer (default: the longest time of the verb).",
        env="DYN_VLLM_ADMIN_TIMEOUT",
        metavar="SECONDS",
    )
    json: bool = opt(False, "workers", "Print JSON for other programs.", env="DYN_VLLM_ADMIN_JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOptions(AdminOptions):
    """What happens to running requests."""

    drain_seconds: float | None = opt(
        None,
        "running requests",
        "Time for running requests; the rest then moves to another worker (default: the worker's own).",
        env="DYN_VLLM_ADMIN_DRAIN_SECONDS",
        metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepOptions(DrainOptions):
    """How deep to sleep."""

    level: int = opt(
        1,
        "sleep",
        "1 keeps the weights in host memory, 2 drops them and reads them again on wake.",
        env="DYN_VLLM_ADMIN_LEVEL",
        metavar="1|2",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseOptions(DrainOptions):
    """Whether running requests are finished first."""

    keep: bool = opt(
        False,
        "running requests",
        "Freeze running requests until 'resume', instead of finishing them first.",
        env="DYN_VLLM_ADMIN_KEEP",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetOptions(AdminOptions):
    """Which caches to clear."""

    kind: tuple[str, ...] = opt(
        CACHES,
        "reset-caches",
        f"Cache to clear: {', '.join(CACHES)}; may be given several times.",
        env="DYN_VLLM_ADMIN_KIND",
        metavar="KIND",
        repeats=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(AdminOptions):
    """How to name a profile."""

    prefix: str | None = opt(
        None,
        "profile",
        "With start: prefix of the profile's file names.",
        env="DYN_VLLM_ADMIN_PREFIX",
        metavar="TEXT",
    )
