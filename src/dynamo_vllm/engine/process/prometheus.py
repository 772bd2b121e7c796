"""Collects the engine's Prometheus series as text, from its processes and from its connector's server."""

from __future__ import annotations

import http.client
import os
import urllib.request

FETCH_SECONDS = 1.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def series() -> str:
    """Every series of this process, or of all its processes when a multi-process folder is set."""
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess

    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(REGISTRY).decode()
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()


def fetched(url: str) -> str:
    """What a server on this machine says; nothing when it does not answer, so that the others are seen."""
    try:
        with _DIRECT.open(url, timeout=FETCH_SECONDS) as answer:
            text = str(answer.read().decode())
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    return text if text.endswith("\n") else text + "\n"
