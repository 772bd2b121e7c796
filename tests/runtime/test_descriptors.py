"""A worker that may open few files, and more streams than it can hold."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import psutil
import pytest

from dynamo_vllm.models.tiny import make_tiny_model
from harness.stack import COMMAND, Stack, Worker, free_port, stack
from harness.waiting import until

LIMIT, STREAMS = 256, 300
ENDLESS = {"model": "tiny", "prompt": "hello", "max_tokens": 2000, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("descriptors")
    model = make_tiny_model(folder / "tiny")
    with stack(folder) as made:
        made.start_frontend()
        port, log = free_port(), folder / "worker.log"
        words = ["--model", str(model), "--served-model-name", "tiny", "--system-port", str(port)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*COMMAND, "worker", *words, "--engine", "fake", "--fake-engine", '{"token_ms": 200}'],
                env=made.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
            )
        made.add(process, port, log)
        yield made.wait_ready()


class Streams:
    """Many at once, which stay open until they are left."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.statuses: Counter[int] = Counter()
        self._leave = asyncio.Event()
        self._seen = asyncio.Semaphore(0)

    async def one(self, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", f"{self._url}/v1/completions", json=ENDLESS) as answer:
            if answer.status_code == 200:
                async for _ in answer.aiter_lines():
                    break
            self.statuses[answer.status_code] += 1
            self._seen.release()
            if answer.status_code == 200:
                await self._leave.wait()

    async def all_seen(self) -> None:
        for _ in range(STREAMS):
            await self._seen.acquire()

    def leave(self) -> None:
        self._leave.set()


async def test_more_streams_than_descriptors(running: Stack) -> None:
    """Some are refused, the others go on; the worker answers probes, does not spin, and serves again."""
    (worker,) = running.workers
    streams = Streams(running.url)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client, asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            tasks.create_task(streams.one(client))
        async with asyncio.timeout(120):
            await streams.all_seen()
        began, used = time.monotonic(), _processor_seconds(worker.pid)
        found = []
        while time.monotonic() - began < 3:  # long enough to tell a loop that spins
            found.append(await asyncio.to_thread(_live, worker))
        share = (_processor_seconds(worker.pid) - used) / (time.monotonic() - began)
        streams.leave()
    assert set(found) == {200}
    assert set(streams.statuses) == {200, 529}
    assert streams.statuses[200] >= LIMIT // 4
    assert share < 0.7
    short = {**ENDLESS, "stream": False, "max_tokens": 2}
    until("an answer", lambda: running.post("/v1/completions", short).status_code == 200)
    assert worker.process.poll() is None


def _live(worker: Worker) -> int:
    return httpx.get(f"{worker.system_url}/live", timeout=60).status_code


def _processor_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
