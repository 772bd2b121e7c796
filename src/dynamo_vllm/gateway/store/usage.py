"""Answers who used how many tokens, from the sums of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.store.buckets import DAY, day_of
from dynamo_vllm.gateway.store.records import Sums

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_vllm.gateway.database import Transaction

GROUPS = ("day", "tenant", "key", "model")
OTHER = "other"
MOST_TENANTS = 100
_SUMMED = "SUM(requests), SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens)"


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums of one group; what is not grouped by is None."""

    sums: Sums
    day: int | None = None
    """Days since 1970-01-01, in UTC."""
    tenant: str | None = None
    key: str | None = None
    model: str | None = None


def usage(
    since: float,
    until: float,
    by: Sequence[str] = ("tenant",),
    *,
    tenant: str | None = None,
    limit: int | None = None,
) -> Callable[[Transaction], list[Usage]]:
    """Sum up whole UTC days: from that of `since` up to, but not including, a day that begins at `until`.

    With a tenant only its rows are read; with a limit only so many sums are returned, the oldest days first.
    """
    columns = [name for name in GROUPS if name in by]
    named = ", ".join(columns)
    sql = f"SELECT {_SUMMED}{', ' if columns else ''}{named} FROM gateway_usage WHERE day >= ? AND day < ?"
    values: list[object] = [day_of(since), -(-int(until) // DAY)]
    if tenant is not None:
        sql += " AND tenant = ?"
        values.append(tenant)
    if columns:
        sql += f" GROUP BY {named} ORDER BY {named}"
    if limit is not None:
        sql += " LIMIT ?"
        values.append(limit)

    def work(t: Transaction) -> list[Usage]:
        rows = [row for row in t.all(sql, *values) if row[0] is not None]  # no rows have no sum
        return [Usage(Sums(*map(int, row[:4])), **dict(zip(columns, row[4:], strict=True))) for row in rows]

    return work


def totals(most: int = MOST_TENANTS) -> Callable[[Transaction], dict[str, Sums]]:
    """Return all that tenants ever used: those with most tokens, and the rest as one, "other".

    Metrics have a bounded number of series so. The sum of "other" falls when a tenant leaves it, which
    Prometheus takes for a restart of the counter.
    """
    order = "ORDER BY prompt_tokens + completion_tokens DESC, tenant"
    columns = "requests, prompt_tokens, cached_tokens, completion_tokens"

    def work(t: Transaction) -> dict[str, Sums]:
        top = t.all(f"SELECT tenant, {columns} FROM gateway_usage_totals {order} LIMIT ?", most)
        found = {str(tenant): Sums(*map(int, sums)) for tenant, *sums in top}
        rest = t.one(
            f"SELECT {_SUMMED} FROM (SELECT {columns} FROM gateway_usage_totals {order} LIMIT ? OFFSET ?)"
            " AS rest",
            *(1_000_000_000, most),
        )
        if rest is not None and rest[0] is not None:
            found[OTHER] = found.get(OTHER, Sums()).plus(Sums(*map(int, rest)))
        return found

    return work
