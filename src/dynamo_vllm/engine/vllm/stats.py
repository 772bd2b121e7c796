"""Passes vLLM's statistics to the worker, and updates vLLM's Prometheus series at less cost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from dynamo_vllm.engine.base import Counting, LoadFigures, OnLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import Histogram
    from vllm.config import VllmConfig


class Load(StatLoggerBase):  # type: ignore[misc]  # vLLM is not followed by mypy
    """Passes the figures of each scheduler step of one rank to the worker."""

    def __init__(
        self, rank: int, on_load: OnLoad, on_step: Callable[[int], None], counting: Counting
    ) -> None:
        self._rank = rank
        self._counting = counting
        self._on_load = on_load
        self._on_step = on_step
        self._generated = self._queries = self._hits = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._on_step(self._rank)  # also for a step of a long prefill, which has no output
        counts = self._counting.is_on
        if iteration_stats is not None and counts:
            self._generated += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            # For this step only. vLLM counts the lookups of preempted requests separately.
            found = scheduler_stats.prefix_cache_stats
            if counts:
                self._queries += found.queries
                self._hits += found.hits
            self._on_load(
                LoadFigures(
                    self._rank,
                    scheduler_stats.num_running_reqs,
                    scheduler_stats.num_waiting_reqs,
                    scheduler_stats.kv_cache_usage,
                    self._generated,
                    self._queries,
                    self._hits,
                )
            )

    def log_engine_initialized(self) -> None:
        """Reports first values, so that the router knows the worker before its first request."""
        self._on_load(LoadFigures(self._rank, 0, 0, 0.0))


class Series(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is not followed by mypy
    """Updates vLLM's series, but observes each inter-token latency only once per step.

    The requests of a step get their tokens together and mostly share one latency. vLLM observes it for each
    of them, which took a tenth of a worker's CPU time at 256 requests.
    """

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        between = iteration_stats.inter_token_latencies_iter if iteration_stats is not None else []
        if between:
            iteration_stats.inter_token_latencies_iter = []
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if between:
            iteration_stats.inter_token_latencies_iter = between
            histogram = self.histogram_inter_token_latency[engine_idx]
            for seconds, times in Counter(between).items():
                observe(histogram, seconds, times)


def loggers(on_load: OnLoad, on_step: Callable[[int], None], counting: Counting) -> list[Any]:
    """Returns the factories for vLLM's stat loggers: the first is called per rank, the second once."""

    def load(vllm_config: VllmConfig, engine_index: int = 0) -> Load:
        return Load(engine_index, on_load, on_step, counting)

    class Counted(Series):  # a class: for a function vLLM would add its own PrometheusStatLogger
        def record(self, *args: Any, **kwargs: Any) -> None:
            if counting.is_on:
                super().record(*args, **kwargs)

    return [load, Counted]


def observe(histogram: Histogram, amount: float, times: int) -> None:
    """Does the same as calling `histogram.observe(amount)` this many times."""
    histogram._sum.inc(amount * times)
    for bound, bucket in zip(histogram._upper_bounds, histogram._buckets, strict=True):
        if amount <= bound:
            bucket.inc(times)
            return
