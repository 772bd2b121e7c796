"""Collects the engine's Prometheus series as text, from its processes and its connector's HTTP server."""

from __future__ import annotations

import http.client
import os
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry

FETCH_SECONDS = 1.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def series() -> str:
    """Returns every series of this process, or of all its processes if a multi-process folder is set."""
    from prometheus_client import generate_latest

    return generate_latest(_registry()).decode()


def totals(names: Iterable[str], label: str) -> dict[tuple[str, str], float]:
    """Returns the values of these series by name and label ("" without it), added up over other labels."""
    registry, wanted = _registry(), set(names)
    metrics = registry.collect()
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:  # faster; several processes have no names
        metrics = registry.restricted_registry(wanted).collect()
    found: dict[tuple[str, str], float] = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name in wanted:
                key = sample.name, sample.labels.get(label, "")
                found[key] = found.get(key, 0.0) + sample.value
    return found


def _registry() -> CollectorRegistry:
    from prometheus_client import REGISTRY, CollectorRegistry, multiprocess

    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return REGISTRY
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry


def fetched(url: str) -> str:
    """Returns the series of a server on this machine; "" if it does not answer, so others still appear."""
    try:
        with _DIRECT.open(url, timeout=FETCH_SECONDS) as answer:
            text = str(answer.read().decode())
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    return text if text.endswith("\n") else text + "\n"
