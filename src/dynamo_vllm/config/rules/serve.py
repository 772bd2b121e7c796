"""Rules for the options of `serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.config.rules import bounds
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import ServeOptions


def worker_counts_are_counts(o: ServeOptions) -> None:
    bounds.at_least(o, 1, "workers", "prefill", "decode", "encode")


def prefill_and_decode_go_together(o: ServeOptions) -> None:
    if o.prefill is not None and o.decode is None:
        raise ConfigError(
            f"--prefill {o.prefill} needs workers that answer; add --decode N, or use --workers alone"
        )
    if o.decode is not None and o.prefill is None:
        raise ConfigError(
            f"--decode {o.decode} needs workers that compute prompts; add --prefill N, or use --workers alone"
        )


def workers_or_roles(o: ServeOptions) -> None:
    if o.workers is not None and o.prefill is not None:
        raise ConfigError(
            f"--workers {o.workers} cannot be combined with --prefill and --decode; leave out --workers, "
            "or both of them"
        )


def model_or_demo(o: ServeOptions) -> None:
    if o.demo is not None and o.model is not None:
        raise ConfigError(f"--demo {o.demo} has its own model; leave out --demo or {o.model}")


def restarts_are_a_count(o: ServeOptions) -> None:
    bounds.at_least(o, 0, "restarts")


def logs_have_bounds(o: ServeOptions) -> None:
    if not 0 <= o.log_mb < float("inf"):
        raise ConfigError(f"--log-mb {o.log_mb} must be 0 or more")
    bounds.at_least(o, 0, "log_parts", "keep_runs")


def retry_time_is_positive(o: ServeOptions) -> None:
    bounds.above_zero(o, "retry_seconds")


def patience_is_positive(o: ServeOptions) -> None:
    bounds.above_zero(o, "hang_seconds", "unwell_seconds")


def start_has_time(o: ServeOptions) -> None:
    bounds.above_zero(o, "start_seconds")


RULES = (
    worker_counts_are_counts,
    prefill_and_decode_go_together,
    workers_or_roles,
    model_or_demo,
    restarts_are_a_count,
    retry_time_is_positive,
    logs_have_bounds,
    patience_is_positive,
    start_has_time,
)
