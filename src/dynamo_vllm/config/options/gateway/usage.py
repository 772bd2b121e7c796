"""Options of `usage`: tokens that were used through the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.gateway.keys import DatabaseOptions

GROUPS = ("day", "tenant", "key", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOptions(DatabaseOptions):
    """Which days to sum up, and how."""

    by: tuple[str, ...] = opt(
        ("tenant",),
        "usage",
        "What each line is for: day, tenant, key, model; several words make a line for each combination.",
        env="DYN_VLLM_USAGE_BY",
        choices=GROUPS,
        metavar="WORD",
    )
    since: str = opt(
        "30d",
        "usage",
        "First day in UTC: 2026-01-31, or 30d for that many days ago.",
        env="DYN_VLLM_USAGE_SINCE",
        metavar="TIME",
    )
    until: str | None = opt(
        None,
        "usage",
        "Day before which to end (default: with today).",
        env="DYN_VLLM_USAGE_UNTIL",
        metavar="TIME",
    )
    csv: bool = opt(False, "output", "Print CSV for spreadsheets.", env="DYN_VLLM_USAGE_CSV")
