"""Writes the gateway's figures for Prometheus; tenants beyond the largest ones share one series."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.store.usage import totals
from dynamo_vllm.serving.metrics.series import MetricSeries, lines

if TYPE_CHECKING:
    from dynamo_vllm.gateway.database import Database
    from dynamo_vllm.gateway.fairness import FairShares

PREFIX = "dynamo_gateway_"


class Figures:
    """Counts answers, and reads the ledger on each scrape."""

    def __init__(self, database: Database, shares: FairShares) -> None:
        self._database = database
        self._shares = shares
        self._by_status: Counter[int] = Counter()

    def count(self, status: int) -> None:
        self._by_status[status] += 1

    async def text(self) -> str:
        tenants = await self._database.run(totals())
        by_kind = [
            ({"tenant": name, "kind": kind}, float(count))
            for name, used in tenants.items()
            for kind, count in (
                ("prompt", used.prompt_tokens),
                ("cached", used.cached_tokens),
                ("completion", used.completion_tokens),
            )
        ]
        series = (
            MetricSeries("tokens_total", "counter", "Tokens in the ledger", by_kind),
            MetricSeries(
                "requests_total",
                "counter",
                "Requests in the ledger",
                [({"tenant": name}, float(used.requests)) for name, used in tenants.items()],
            ),
            MetricSeries(
                "answers_total",
                "counter",
                "Answers of this gateway since its start, by status",
                [({"status": str(status)}, float(n)) for status, n in sorted(self._by_status.items())],
            ),
            MetricSeries(
                "requests_in_flight",
                "gauge",
                "Requests of this gateway",
                [({}, float(self._shares.in_flight))],
            ),
            MetricSeries(
                "slots",
                "gauge",
                "Requests for which this gateway has room in the engines",
                [({}, self._shares.slots)] if self._shares.slots is not None else [],
            ),
            MetricSeries(
                "requests_waiting",
                "gauge",
                "Requests of tenants above their part that wait in this gateway",
                [({}, float(self._shares.waiting))],
            ),
        )
        return "".join(line for one in series for line in lines(one, PREFIX))
