"""Writes the worker's own metrics in Prometheus' text format."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dynamo_vllm.admin.base import WorkerState
from dynamo_vllm.lora.slots import AdapterState as AdapterState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dynamo_vllm.engine.base import LoadFigures, Tiers
    from dynamo_vllm.lora.registry import Registry
    from dynamo_vllm.serving.metrics.load_meter import LoadMeter

Labels = dict[str, str]
PREFIX = "dynamo_component_"


class HasState(Protocol):
    @property
    def state(self) -> WorkerState: ...


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """One metric with all its values."""

    name: str
    kind: str
    """gauge or counter."""
    help: str
    values: Iterable[tuple[Labels, float]]


# Per rank: the metric, its kind, its help text, and its value.
_OF_A_RANK: tuple[tuple[str, str, str, Callable[[LoadFigures, int], float]], ...] = (
    ("total_blocks", "gauge", "KV cache blocks of the rank", lambda f, total: total),
    ("active_blocks", "gauge", "KV cache blocks in use", lambda f, total: round(f.kv_usage * total)),
    ("gpu_cache_usage_percent", "gauge", "KV cache in use, 0 to 1", lambda f, total: f.kv_usage),
    ("requests_running", "gauge", "Requests the engine works on", lambda f, total: f.running),
    ("requests_waiting", "gauge", "Requests the engine has queued", lambda f, total: f.waiting),
    ("generated_tokens_total", "counter", "Tokens the engine generated", lambda f, total: f.generated_tokens),
    (
        "prefix_queries_total",
        "counter",
        "Prompt tokens looked for in the prefix cache",
        lambda f, total: f.prefix_queries,
    ),
    (
        "prefix_hits_total",
        "counter",
        "Prompt tokens found in the prefix cache",
        lambda f, total: f.prefix_hits,
    ),
)


@dataclass(slots=True, kw_only=True)
class Exposition:
    """Reads the parts of a worker on every scrape."""

    model: str
    role: str
    meter: LoadMeter
    in_flight: Callable[[], int]
    life: HasState
    adapters: Registry | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    """The folders that this worker writes to, by purpose."""
    kv_event_publishers: int = 0
    tiers: Tiers | None = None

    def text(self) -> str:
        return "".join(line for series in self._all() for line in lines(series))

    def _all(self) -> Iterator[MetricSeries]:
        model = {"model": self.model}
        for name, kind, text, value in _OF_A_RANK:
            yield MetricSeries(name, kind, text, self._by_rank(value))
        yield MetricSeries(
            "requests_in_flight", "gauge", "Requests this worker holds", [(model, self.in_flight())]
        )
        yield MetricSeries(
            "worker_state",
            "gauge",
            "1 for the state this worker is in",
            [
                (model | {"role": self.role, "state": state.value}, float(state is self.life.state))
                for state in WorkerState
            ],
        )
        yield MetricSeries(
            "kv_event_publishers",
            "gauge",
            "Ranks that publish KV events",
            [(model, self.kv_event_publishers)],
        )
        yield MetricSeries(
            "kv_transfers_lost_total",
            "counter",
            "KV caches that were not transferred and were computed here",
            [(model, self.meter.lost_transfers)],
        )
        yield MetricSeries(
            "encodings_lost_total",
            "counter",
            "Requests whose media no encode worker encoded",
            [(model, self.meter.lost_encodings)],
        )
        yield MetricSeries(
            "answers_unread_total",
            "counter",
            "Requests that were ended because their client did not read the answer",
            [(model, self.meter.unread_answers)],
        )
        yield from self._of_adapters(model)
        yield from self._of_tiers(model)
        yield from self._of_folders()

    def _by_rank(self, value: Callable[[LoadFigures, int], float]) -> Iterator[tuple[Labels, float]]:
        for rank, figures in sorted(self.meter.latest.items()):
            yield {"model": self.model, "dp_rank": str(rank)}, value(figures, self.meter.total_blocks)

    def _of_adapters(self, model: Labels) -> Iterator[MetricSeries]:
        if self.adapters is None:
            return
        states = [entry.state for entry in self.adapters.entries()]
        loaded = sum(state is AdapterState.LOADED for state in states)
        yield MetricSeries("adapters_loaded", "gauge", "LoRA adapters that are loaded", [(model, loaded)])
        yield MetricSeries(
            "adapters_capacity",
            "gauge",
            "LoRA adapters that can be loaded",
            [(model, self.adapters.capacity)],
        )
        yield MetricSeries(
            "adapter_failures_total",
            "counter",
            "LoRA adapters that could not be loaded",
            [(model, self.adapters.failures)],
        )

    def _of_tiers(self, model: Labels) -> Iterator[MetricSeries]:
        """What is in them and what they do is in vLLM's series."""
        if self.tiers is not None:
            sizes = [(model | {"tier": tier}, float(size)) for tier, size in self.tiers.sizes.items()]
            yield MetricSeries("kv_tier_bytes", "gauge", "Size of a tier of KV caches", sizes)

    def _of_folders(self) -> Iterator[MetricSeries]:
        free, total = [], []
        for use, folder in self.folders.items():
            with contextlib.suppress(OSError):  # not created yet
                disk = shutil.disk_usage(folder)
                free.append(({"folder": use}, float(disk.free)))
                total.append(({"folder": use}, float(disk.total)))
        yield MetricSeries(
            "disk_free_bytes", "gauge", "Free space on the disk of a folder that this worker uses", free
        )
        yield MetricSeries("disk_bytes", "gauge", "Size of that disk", total)


def lines(series: MetricSeries, prefix: str = PREFIX) -> Iterator[str]:
    name = prefix + series.name
    yield f"# HELP {name} {series.help}\n"
    yield f"# TYPE {name} {series.kind}\n"
    for labels, value in series.values:
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{shown}}} {value:.17g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
