"""A deployment on this machine for a test: a frontend and workers, on free ports, in their own folder."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import psutil

from dynamo_vllm.engine.machine import device
from dynamo_vllm.supervise.probe import went_over_two
from harness import forks, metrics
from harness.hosts import Host
from harness.processes import free_port, kill_tree
from harness.waiting import until

if TYPE_CHECKING:
    import openai

TESTS = Path(__file__).parents[1]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Loopback only, no outside services but those of `harness.planes`, nothing of the caller's settings."""
    from harness.planes import chosen_env  # which starts servers with what stands here

    hub = {} if "HF_ENDPOINT" in more else {"HF_HUB_OFFLINE": "1"}  # who names a hub has one of their own
    others = ("HF_HUB_OFFLINE", "DYN_", "VLLM_", "PROMETHEUS_", "ETCD_", "NATS_", "SSL_CERT_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    if device() == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept | {
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_NAMESPACE": "dynamo",
        "DYN_VLLM_BIND_HOST": "127.0.0.1",
        "DYN_VLLM_CONSOLE": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        **hub,
        **chosen_env(folder),
        **more,
    }


class Process(Protocol):
    """A worker or frontend, however it was started."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...


@dataclass
class Worker:
    """A running worker and the port of its own /health and /metrics."""

    process: Process
    system_port: int
    log: Path
    address: str = "127.0.0.1"

    @property
    def system_url(self) -> str:
        return f"http://{self.address}:{self.system_port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def metric(self, name: str, **labels: object) -> float:
        """The sum over a metric's series, or over those with labels such as `engine=1`."""
        return metrics.total(httpx.get(f"{self.system_url}/metrics", timeout=30).text, name, **labels)

    def health(self) -> int | None:
        """The status of /health; None when nobody answers."""
        try:
            return httpx.get(f"{self.system_url}/health", timeout=5).status_code
        except httpx.HTTPError:
            return None

    def is_ready(self) -> bool:
        return self.health() == 200

    def admin(self, verb: str, **body: Any) -> httpx.Response:
        """An admin verb over the system port."""
        return httpx.post(f"{self.system_url}/engine/{verb}", json=body, timeout=120)

    def busy(self) -> int:
        """Requests the engine runs or has queued."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return int(sum(self.metric(name) for name in names))


@dataclass
class Stack:
    """Frontend and workers of one test."""

    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Settings of every process."""
    port: int = field(default_factory=free_port)
    address: str = "127.0.0.1"
    processes: list[Process] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @functools.cached_property
    def openai(self) -> openai.OpenAI:
        import openai  # 0.8 s, which only those who ask that way pay

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def environment(self, host: Host | None = None, **more: str) -> dict[str, str]:
        return environment(self.folder, **{**self.env, **(host.environment if host else {}), **more})

    def start_frontend(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        host: Host | None = None,
        name: str = "frontend",
    ) -> Process:
        """A frontend; on another machine it is asked at that one's address. `name` is that of its log."""
        if host is not None:
            self.address = host.address
        return self._start(name, ["frontend", "--port", str(self.port), *args], env, host)

    def start_worker(
        self, *args: str, env: Mapping[str, str] | None = None, host: Host | None = None
    ) -> Worker:
        """A worker as a process of its own."""
        port = free_port()
        name = f"worker{len(self.workers)}"
        process = self._start(name, ["worker", "--system-port", str(port), *args], env, host)
        return self.add(process, port, self.folder / f"{name}.log", host)

    def add(self, process: Process, system_port: int, log: Path, host: Host | None = None) -> Worker:
        worker = Worker(process, system_port, log, *([host.address] if host else []))
        self.workers.append(worker)
        if process not in self.processes:
            self.processes.append(process)
        return worker

    def _start(
        self,
        name: str,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        host: Host | None = None,
    ) -> Process:
        log, env = self.folder / f"{name}.log", self.environment(host, **(env or {}))
        process = forks.start(args[0], args[1:], env, log, host)
        self.processes.append(process)
        return process

    def wait_ready(self, seconds: float = 60.0) -> Stack:
        """Every worker and the frontend say ready."""
        for worker in self.workers:
            until(f"{worker.log.name} ready", functools.partial(self._is_ready, worker), seconds)
        until("frontend ready", lambda: self.get("/health").status_code == 200, seconds)
        until("all workers seen", lambda: len(self.instances()) == len(self.workers), seconds)
        return self

    def wait_listed(self, *models: str) -> Stack:
        """With several models the frontend is ready as soon as it knows one of them."""
        until(f"{', '.join(models)} listed", lambda: set(models) <= set(self.models()))
        return self

    def wait_over_two(self, model: str = "tiny", length: int = 1, seconds: float = 60.0) -> Stack:
        """A prompt of this length goes over a prefill worker, which the frontend refuses while one joins."""
        body = {"model": model, "prompt": [10] * length, "max_tokens": 1}
        body["nvext"] = {"extra_fields": ["worker_id"]}

        def answered() -> bool:
            found = self.post("/v1/completions", body)
            assert found.status_code in (200, 503), found.text
            return found.status_code == 200 and went_over_two(found.json())

        until(f"prefill workers of {model} in use", answered, seconds)
        return self

    def _is_ready(self, worker: Worker) -> bool:
        return self._alive(worker) and worker.is_ready()

    def _alive(self, worker: Worker) -> bool:
        if worker.process.poll() is not None:
            raise AssertionError(f"{worker.log.name} ended:\n{worker.log.read_text()[-3000:]}")
        return True

    def get(self, path: str) -> httpx.Response:
        try:
            return httpx.get(self.url + path, timeout=30)
        except httpx.TransportError:
            return httpx.Response(599)

    def post(self, path: str, body: object = None, **more: Any) -> httpx.Response:
        if body is not None:
            more["json"] = body
        return httpx.post(self.url + path, timeout=60, **more)

    def instances(self) -> list[dict[str, Any]]:
        found = self.get("/instances")
        if found.status_code != 200:
            return []
        mine = self.environment()["DYN_NAMESPACE"]  # it lists those of other tests in the same etcd too
        every: list[dict[str, Any]] = found.json()["instances"]
        return [i for i in every if i["endpoint"] == "generate" and i["namespace"] == mine]

    def models(self) -> list[str]:
        found = self.get("/v1/models")  # a frontend that starts answers 404 for a moment
        return [model["id"] for model in found.json()["data"]] if found.status_code == 200 else []

    def pids(self) -> list[int]:
        """Of every process, and of all below them."""
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was ended
                root = psutil.Process(process.pid)
                found += [root.pid, *(child.pid for child in root.children(recursive=True))]
        return found

    def stop(self) -> None:
        if "openai" in self.__dict__:  # somebody asked with it
            self.openai.close()
        for process in self.processes:
            kill_tree(process.pid)
        for process in self.processes:
            process.wait(60)


@contextlib.contextmanager
def stack(folder: Path, **env: str) -> Iterator[Stack]:
    """`env` are settings of every process in it."""
    made = Stack(folder, env)
    try:
        yield made
    finally:
        made.stop()
