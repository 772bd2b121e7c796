"""The worker's figures: load for the router, series for Prometheus."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from dynamo_vllm.engine.base import LoadFigures

if TYPE_CHECKING:
    from collections.abc import Callable


logger = logging.getLogger(__name__)


class LoadPublisher(Protocol):
    """The part of the runtime's WorkerMetricsPublisher we use."""

    def publish(self, dp_rank: int | None = None, *, kv_used_blocks: int | None = None) -> None: ...


class LoadMeter:
    """Keeps the newest figures per rank and tells the router when the number of used blocks changes.

    The engine may report before the runtime is there: figures are kept and published on `connect`.
    """

    def __init__(self) -> None:
        self.latest: dict[int, LoadFigures] = {}
        self._total_blocks = 1
        self._published: dict[int, int] = {}
        self._publisher: LoadPublisher | None = None
        self._complained = False
        self.lost_transfers = 0

    def count_lost_transfer(self) -> None:
        """A KV cache that should have come from another engine and did not."""
        self.lost_transfers += 1

    def connect(self, publisher: LoadPublisher, total_blocks: int, ranks: range) -> None:
        """First values at start, so that a router knows the worker before its first request."""
        self._publisher, self._total_blocks = publisher, max(1, total_blocks)
        for rank in ranks:
            self.record(self.latest.get(rank, LoadFigures(rank, 0, 0, 0.0)))

    def record(self, figures: LoadFigures) -> None:
        self.latest[figures.rank] = figures
        used = round(figures.kv_usage * self._total_blocks)
        if self._publisher is not None and self._published.get(figures.rank) != used:
            self._published[figures.rank] = used
            self._publish(figures.rank, used)

    def _publish(self, rank: int, used: int) -> None:
        """Called inside vLLM's output handler, which any exception would end, and with it the engine."""
        if self._publisher is None:
            return
        try:
            self._publisher.publish(rank, kv_used_blocks=used)
        except Exception:  # the runtime raises nothing narrower
            if not self._complained:
                self._complained = True
                logger.exception("the router does not hear of this worker's load")

    @property
    def total_blocks(self) -> int:
        return self._total_blocks


_SERIES: tuple[tuple[str, str, Callable[[LoadFigures, int], float]], ...] = (
    ("dynamo_component_total_blocks", "KV cache blocks of the rank", lambda f, total: total),
    ("dynamo_component_active_blocks", "KV cache blocks in use", lambda f, total: round(f.kv_usage * total)),
    ("dynamo_component_gpu_cache_usage_percent", "KV cache in use, 0 to 1", lambda f, total: f.kv_usage),
    ("dynamo_component_requests_running", "Requests the engine works on", lambda f, total: f.running),
    ("dynamo_component_requests_waiting", "Requests the engine has queued", lambda f, total: f.waiting),
)


def exposition(meter: LoadMeter, in_flight: int, model: str) -> str:
    """Our series in Prometheus' text format."""
    model = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for name, text, value in _SERIES:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        for rank, figures in sorted(meter.latest.items()):
            lines.append(f'{name}{{model="{model}",dp_rank="{rank}"}} {value(figures, meter.total_blocks)}')
    name = "dynamo_component_requests_in_flight"
    lines += [f"# HELP {name} Requests this worker holds", f"# TYPE {name} gauge"]
    lines.append(f'{name}{{model="{model}"}} {in_flight}')
    name = "dynamo_component_kv_transfers_lost_total"
    lines += [f"# HELP {name} KV caches that did not come and were computed here", f"# TYPE {name} counter"]
    lines.append(f'{name}{{model="{model}"}} {meter.lost_transfers}')
    return "\n".join(lines) + "\n"
