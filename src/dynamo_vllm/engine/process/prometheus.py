"""Collects the engine's Prometheus series as text, from its processes and its connector's HTTP server."""

from __future__ import annotations

import http.client
import os
import urllib.request

FETCH_SECONDS = 1.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def series() -> str:
    """Returns every series of this process, or of all its processes if a multi-process folder is set."""
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess

    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(REGISTRY).decode()
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()


def fetched(url: str) -> str:
    """Returns the series of a server on this machine; "" if it does not answer, so others still appear."""
    try:
        with _DIRECT.open(url, timeout=FETCH_SECONDS) as answer:
            text = str(answer.read().decode())
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    return text if text.endswith("\n") else text + "\n"
