"""Starts frontends and workers on this machine for a measurement: free ports, loopback, their own folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from dynamo_vllm import forking, ports
from dynamo_vllm.bench.http import metrics, target
from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

COMMAND = (sys.executable, "-m", "dynamo_vllm.cli.main")
START_SECONDS = 180.0
STOP_SECONDS = 10.0
FOLDER_PREFIX = "dynamo-vllm-bench-"
_PAGE_SECONDS = 10.0
_POLL_SECONDS = 0.05
# Variables with these prefixes are not passed on, so that they cannot change a measurement.
_DROPPED_PREFIXES = ("DYN_", "VLLM_", "PROMETHEUS_")
# The runtime's variables that --bind-host sets, for workers of other projects.
_HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")


@dataclass
class LocalProcess:
    """A started process; `port` is a frontend's HTTP port or a worker's system port."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    below: list[psutil.Process] = field(default_factory=list)
    """Its descendants when it was asked to end."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counters(self, names: Sequence[str]) -> dict[str, float]:
        """Return each Prometheus counter, summed over its series."""
        page = get(f"{self.url}/metrics") or ""
        return {name: metrics.total(page, name) or 0.0 for name in names}

    def ask_to_end(self) -> None:
        """Send SIGTERM, so that the process leaves discovery."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.below = psutil.Process(self.pid).children(recursive=True)
            self.process.terminate()

    def end(self) -> None:
        """Wait for the process, and kill it after a while; kill what is left of its descendants."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        for left in self.below:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        self.process.kill()
        self.process.wait()


@dataclass
class Deployment:
    """The processes that share one discovery folder."""

    folder: Path
    environment: Mapping[str, str]
    running: list[LocalProcess] = field(default_factory=list)

    def start_frontend(self, name: str, *args: str) -> LocalProcess:
        port = ports.reserve_for_life()
        return self._start(name, [*COMMAND, "frontend", "--port", str(port), *args], port)

    def start_worker(self, name: str, *args: str) -> LocalProcess:
        port = ports.reserve_for_life()
        return self._start(name, [*COMMAND, "worker", "--system-port", str(port), *args], port)

    def start_command(self, name: str, command: Sequence[str]) -> LocalProcess:
        """Start a worker of another project; it gets its system port from the environment."""
        port = ports.reserve_for_life()
        return self._start(name, command, port, DYN_SYSTEM_PORT=str(port))

    def _start(self, name: str, command: Sequence[str], port: int, **more: str) -> LocalProcess:
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env={**self.env, **more},
                stdout=output,
                stderr=output,
                start_new_session=True,
                # A signal between the fork and the next lines would leave it running with nobody to stop it.
                preexec_fn=functools.partial(forking.end_with_parent, os.getpid(), signal.SIGTERM),
            )
        started = LocalProcess(name, process, port, log)
        self.running.append(started)
        return started

    @property
    def env(self) -> dict[str, str]:
        kept = {
            name: value for name, value in self.environment.items() if not name.startswith(_DROPPED_PREFIXES)
        }
        return kept | {
            **dict.fromkeys(_HOSTS, "127.0.0.1"),
            "DYN_FILE_KV": str(self.folder / "discovery"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "warn",
            "DYN_VLLM_BIND_HOST": "127.0.0.1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def wait_for_workers(self, frontend: LocalProcess, count: int) -> None:
        """Wait until the frontend sees this many workers and is ready."""
        self.wait(f"{count} workers at {frontend.name}", lambda: len(self.instances(frontend)) == count)
        self.wait(f"{frontend.name} to be ready", lambda: get(f"{frontend.url}/health") is not None)

    def instances(self, frontend: LocalProcess) -> list[dict[str, object]]:
        text = get(f"{frontend.url}/instances")
        found = json.loads(text)["instances"] if text else []
        return [instance for instance in found if instance["endpoint"] == "generate"]

    def wait(self, what: str, is_done: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not is_done():
            for started in self.running:
                if started.process.poll() is not None:
                    raise StartError(f"{started.name} ended:\n{tail(started.log)}")
            if time.monotonic() > deadline:
                last = "".join(f"\n{started.name}:\n{tail(started.log, 500)}" for started in self.running)
                raise StartError(f"waited {seconds:.0f} s for {what}{last}")
            time.sleep(_POLL_SECONDS)

    def stop(self, *which: LocalProcess) -> None:
        """Stop these processes, or all; the last one started is asked first."""
        stopping = tuple(reversed(which or tuple(self.running)))
        for started in stopping:
            started.ask_to_end()
        for started in stopping:
            started.end()
            self.running.remove(started)


@contextlib.contextmanager
def deployment(folder: Path, environment: Mapping[str, str]) -> Iterator[Deployment]:
    folder.mkdir(parents=True, exist_ok=True)
    made = Deployment(folder, environment)
    try:
        yield made
    finally:
        made.stop()


def get(url: str) -> str | None:
    """Fetch a page; return None if its status is not 200 or nothing answers."""
    try:
        page = target.get(url, _PAGE_SECONDS)
    except target.BenchError:
        return None
    return None if page is None else page.decode()


def tail(path: Path, characters: int = 2000) -> str:
    return path.read_text(errors="replace")[-characters:]
