"""vLLM's figures: one logger per data-parallel rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

from dynamo_vllm.engine.base import LoadFigures, OnLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig


class Load(StatLoggerBase):  # type: ignore[misc]  # vLLM is not followed by mypy
    """Hands each scheduler step's figures of one rank to the worker."""

    def __init__(self, rank: int, on_load: OnLoad, on_step: Callable[[int], None]) -> None:
        self._rank = rank
        self._on_load = on_load
        self._on_step = on_step

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._on_step(self._rank)  # also for a step of a long prefill, which puts nothing out
        if scheduler_stats is not None:
            self._on_load(
                LoadFigures(
                    self._rank,
                    scheduler_stats.num_running_reqs,
                    scheduler_stats.num_waiting_reqs,
                    scheduler_stats.kv_cache_usage,
                )
            )

    def log_engine_initialized(self) -> None:
        """First values, so that a router knows the worker before its first request."""
        self._on_load(LoadFigures(self._rank, 0, 0, 0.0))


def load_logger(on_load: OnLoad, on_step: Callable[[int], None]) -> Callable[[VllmConfig, int], Load]:
    """What vLLM calls once per rank."""

    def make(vllm_config: VllmConfig, engine_index: int = 0) -> Load:
        return Load(engine_index, on_load, on_step)

    return make
