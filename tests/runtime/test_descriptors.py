"""A worker that may open few files, and more streams than it can hold."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from harness.misbehaving import Streams
from harness.processes import COMMAND, free_port
from harness.stack import Stack, Worker, environment, stack
from harness.waiting import until
from runtime.conftest import fake

LIMIT, STREAMS = 256, 300
WAITING = 4
"""The runtime has a few places where requests wait for others to end."""
ENDLESS = {"model": "tiny", "prompt": "hello", "max_tokens": 2000, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("descriptors")
    with stack(folder) as made:
        made.start_frontend()
        port, log = free_port(), folder / "worker.log"
        words = (*fake(model, token_ms=200), "--system-port", str(port))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*COMMAND, "worker", *words],
                env=made.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
            )
        made.add(process, port, log)
        yield made.wait_ready()


@pytest.mark.parametrize(("process", "left"), [("frontend", 8), ("worker", 3)])
def test_watches_of_the_kernel_that_are_used_up_are_named(
    process: str, left: int, model: Path, tmp_path: Path
) -> None:
    """In a user namespace, which has a limit of its own."""
    limit = "/proc/sys/user/max_inotify_instances"
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", f'echo {left} > {limit} && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    words = {
        "frontend": ("--port", str(free_port())),
        "worker": fake(model),
    }
    done = subprocess.run(
        [*inside, *COMMAND, process, *words[process]],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"inotify instances, and this user has {left} left" in line
    assert "sysctl -w fs.inotify.max_user_instances=1024" in line


async def test_more_streams_than_descriptors(running: Stack) -> None:
    """Some are refused, the others go on; the worker answers probes, does not spin, and serves again."""
    (worker,) = running.workers
    streams = Streams(running.url)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client, asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            tasks.create_task(streams.one(client, ENDLESS))
        async with asyncio.timeout(120):
            await streams.seen(STREAMS - WAITING)
        began, used, read = time.monotonic(), _processor_seconds(worker.pid), streams.lines
        found = []
        while time.monotonic() - began < 3:  # long enough to tell a loop that spins
            found.append(await asyncio.to_thread(_live, worker))
        share = (_processor_seconds(worker.pid) - used) / (time.monotonic() - began)
        assert streams.lines > read, "those that got a place go on"
        streams.leave()
    assert set(found) == {200}
    assert set(streams.statuses) == {200, 529} and streams.statuses.total() == STREAMS
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
