"""Options of the commands for the processes of a `serve`: `processes`, `restart`, `drain`, `scale`."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Which `serve` to ask, and how to print its answer."""

    run_dir: str | None = opt(
        None,
        "serve",
        "Run folder of the serve to use (default: the only one on this machine).",
        env="DYN_VLLM_RUN_DIR",
        metavar="FOLDER",
    )
    json: bool = opt(False, "serve", "Print JSON for other programs.", env="DYN_VLLM_ADMIN_JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptions(ControlOptions):
    """What happens to the requests of processes that stop."""

    drain_seconds: float | None = opt(
        None,
        "running requests",
        "Time for running requests; the rest then moves to another worker (default and maximum: the "
        "process's own).",
        env="DYN_VLLM_ADMIN_DRAIN_SECONDS",
        metavar="SECONDS",
    )
