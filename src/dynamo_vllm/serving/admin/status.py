"""Answers the `status` verb: the worker's state and load."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_vllm.admin.base import Reply, WorkerState
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.engine.base import Tiers
    from dynamo_vllm.job import EngineFacts
    from dynamo_vllm.lora.registry import Registry
    from dynamo_vllm.serving.metrics.load_meter import LastError, LoadMeter
    from dynamo_vllm.serving.request.cancel import InFlight


class WorkerStatus:
    """Reads the parts of a worker on each call."""

    def __init__(
        self,
        options: WorkerOptions,
        facts: EngineFacts,
        instance: int,
        names: tuple[str, ...],
        meter: LoadMeter,
        in_flight: InFlight,
        last_error: LastError,
        tiers: Tiers | None = None,
    ) -> None:
        self._options = options
        self._facts = facts
        self._instance = instance
        self._names = names
        self._meter = meter
        self._in_flight = in_flight
        self._last_error = last_error
        self._tiers = tiers
        self._began = time.monotonic()

    def reply(self, state: WorkerState, adapters: Registry | None) -> Reply:
        entries = adapters.entries() if adapters is not None else []
        return {
            "instance": self._instance,
            "name": self._options.address.rpartition(".")[0],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "role": self._options.role,
            "state": state.value,
            "models": list(self._names),
            "adapters": [{"name": e.name, "state": e.state.value, "leases": e.leases} for e in entries],
            "ranks": self._meter.ranks(),
            "total_blocks": self._meter.total_blocks,
            "tiers": [asdict(figures) for figures in self._tiers.figures()] if self._tiers else [],
            "in_flight": len(self._in_flight),
            "requests": self._in_flight.total,
            "uptime_seconds": round(time.monotonic() - self._began, 1),
            "last_error": self._last_error.report(),
            "versions": dict(self._facts.versions),
        }
