"""Tells Prometheus where the processes of a `serve` are: one file for its file-based discovery."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_vllm.supervise.planning.process import Process

GATEWAY = "dynamo-vllm-gateway"
JOBS = {"frontend": "dynamo-vllm-frontend", "gateway": GATEWAY, "envoy": GATEWAY}
"""Job names of the rules in deploy/observability, by process; others are workers, or have no metrics."""
WORKER = "dynamo-vllm-worker"


class Targets:
    """Written again whenever a process starts, since its port may change."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._groups: dict[str, dict[str, object]] = {}

    def started(self, process: Process, port: int) -> None:
        if not process.is_worker and process.name not in JOBS:
            return
        url = urlsplit(process.health_url(port))
        labels = {"job": JOBS.get(process.name, WORKER), "process": process.name, "__scheme__": url.scheme}
        self._groups[process.name] = {"targets": [url.netloc], "labels": labels}
        self._write()

    def removed(self, process: Process) -> None:
        """The process is gone for good, so nobody should miss it."""
        if self._groups.pop(process.name, None) is not None:
            self._write()

    def _write(self) -> None:
        """Write atomically: Prometheus reads the file as soon as it changes. A full disk must not
        end a serve.
        """
        fresh = self._file.with_suffix(".new")
        with contextlib.suppress(OSError):
            fresh.write_text(json.dumps(list(self._groups.values()), indent=2) + "\n")
            os.replace(fresh, self._file)
