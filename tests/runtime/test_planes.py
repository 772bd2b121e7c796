"""Every way to find and to reach workers, with real etcd and NATS servers; and these servers restarted."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_vllm.config.planes import EtcdAccess
from dynamo_vllm.serving.plane.etcd import Etcd
from harness import commands
from harness.planes import Planes, planes
from harness.processes import free_port
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import fake

ASK = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 4}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
LONG_ANSWER = {**ASK, "max_tokens": 100, "ignore_eos": True, "stream": True}
COMBINATIONS = [
    "etcd,tcp,zmq",
    "etcd,nats,nats",
    "file,nats,zmq",
    pytest.param("file,tcp,nats", marks=pytest.mark.long),
    pytest.param("etcd,tcp,nats", marks=pytest.mark.long),
    pytest.param("etcd,nats,zmq", marks=pytest.mark.long),
    pytest.param("file,nats,nats", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planes]:
    """Both servers."""
    with planes("etcd,nats,nats", tmp_path_factory.mktemp("servers")) as made:
        yield made


def start(made: Stack, model: Path, workers: int, frontend: Sequence[str] = (), **spec: Any) -> Stack:
    made.start_frontend(*frontend)
    for _ in range(workers):
        made.start_worker(*fake(model, **spec))
    return made.wait_ready()


# --- combinations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", COMBINATIONS)
def test_combination_answers_streams_cancels_and_is_shown(
    named: str, every: Planes, model: Path, tmp_path: Path
) -> None:
    with stack(tmp_path, **every.of(named).env(tmp_path)) as made:
        (worker,) = start(made, model, 1, token_ms=5).workers
        create: Any = made.openai.chat.completions.create
        chunks = [chunk.choices[0] for chunk in create(**CHAT, stream=True)]
        assert chunks[-1].finish_reason == "length"
        assert sum(bool(chunk.delta.content) for chunk in chunks) > 1
        endless = {**LONG_ANSWER, "max_tokens": 1500}
        with httpx.stream("POST", f"{made.url}/v1/completions", json=endless, timeout=30) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()  # gone, it would end the request
            next(lines)
            assert worker.metric("dynamo_component_requests_in_flight") == 1
        until("the end of a request", lambda: worker.metric("dynamo_component_requests_in_flight") == 0)
        shown = json.loads(commands.output(made.environment(), "status", made.url, "--json"))
        assert [one["state"] for one in shown["workers"]] == ["ready"]


@pytest.mark.parametrize(
    ("command", "server"),
    [
        ("worker", "etcd"),
        ("status", "etcd"),
        pytest.param("frontend", "nats", marks=pytest.mark.long),
    ],
)
def test_server_that_is_away_is_told_at_once_with_the_fix(
    command: str, server: str, model: Path, tmp_path: Path
) -> None:
    away = f"127.0.0.1:{free_port()}"
    flags = {
        "etcd": ["--discovery-backend", "etcd", "--etcd-endpoints", f"http://{away}"],
        "nats": ["--request-plane", "nats", "--nats-server", f"nats://user:secret@{away}"],
    }
    words = {
        "worker": ["worker", "--model", str(model), "--engine", "fake"],
        "frontend": ["frontend", "--port", str(free_port())],
        "status": ["status", f"http://{away}", "--file-kv", str(tmp_path)],
    }
    env = Stack(tmp_path).environment(XDG_CACHE_HOME=str(tmp_path))
    done = commands.run(env, *words[command], *flags[server])
    assert done.returncode == 1
    assert f"does not answer at {away} (Connection refused)" in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


# --- restarts under load ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(every: Planes, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("cluster")
    with stack(folder, **every.env(folder)) as made:
        yield start(made, model, 2, token_ms=30)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def load(made: Stack, pool: ThreadPoolExecutor, count: int = 6) -> list[Future[str]]:
    """So many long answers, each with its first token there."""
    begun = [threading.Event() for _ in range(count)]
    answers = [pool.submit(long_answer, made, event) for event in begun]
    assert all(event.wait(60) for event in begun)
    return answers


def long_answer(made: Stack, begun: threading.Event) -> str:
    text = ""
    with httpx.stream("POST", f"{made.url}/v1/completions", json=LONG_ANSWER, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text += choice["text"]
            begun.set()
            if choice.get("finish_reason"):
                return f"{choice['finish_reason']}: {text}"
    return f"cut: {text}"


def is_answered(made: Stack) -> bool:
    """Eight times in a row: two workers, and each may be the one that is not back."""
    return all(made.post("/v1/completions", ASK).status_code == 200 for _ in range(8))


@pytest.mark.parametrize(
    "fault",
    [
        "etcd",
        "etcd without its data",
        "nats",
        pytest.param("nats for eleven seconds", marks=pytest.mark.long),
    ],
)
def test_restart_under_load_loses_nothing_and_new_requests_are_answered(
    fault: str, every: Planes, cluster: Stack, pool: ThreadPoolExecutor
) -> None:
    expected = long_answer(cluster, threading.Event())
    before = until("both workers", lambda: of_both(cluster))
    pids = [worker.pid for worker in cluster.workers]
    running = load(cluster, pool)
    server = every.servers[fault.split()[0]]
    is_lost = "without" in fault
    if "eleven" in fault:
        server.stop()
        asked = pool.submit(cluster.post, "/v1/completions", ASK)
        time.sleep(11)  # the fault itself
        assert not asked.done(), "the runtime's own patience is 10 s"
        server.start()
        # Who finds no worker, because the frontend was back a moment earlier, is told so.
        assert asked.result(60).status_code in (200, 500, 503)
    else:
        server.restart(lose_data=is_lost)
    if is_lost:  # until then nobody may have noticed
        until("all workers back in etcd", lambda: all(map(was_restored, cluster.workers)))
    until("answers", lambda: is_answered(cluster))
    assert [answer.result(60) for answer in running] == [expected] * len(running)
    assert expected.startswith("length: ")
    until("the same workers", lambda: instances(cluster) == before)
    assert [worker.process.poll() for worker in cluster.workers] == [None, None]
    assert [worker.pid for worker in cluster.workers] == pids


def instances(made: Stack) -> set[int]:
    return {int(one["instance_id"]) for one in made.instances()}


def of_both(made: Stack) -> set[int]:
    """Returns nothing while one of two is not seen."""
    found = instances(made)
    return found if len(found) == 2 else set()


def was_restored(worker: Any) -> bool:
    return "etcd had lost this process" in worker.log.read_text()


async def test_drained_worker_is_out_of_etcd_before_it_ends(every: Planes, cluster: Stack) -> None:
    """Its lease would keep it there for ten seconds more."""
    before = until("both workers", lambda: of_both(cluster))
    leaving = cluster.workers.pop()
    leaving.signal(signal.SIGTERM)
    assert leaving.process.wait(60) == 0
    async with Etcd(EtcdAccess((every.servers["etcd"].url,))) as client:
        found = [await client.lease(number) for number in before]
    assert len([lease for lease in found if lease and lease.keys]) == 1
    until("one worker", lambda: len(cluster.instances()) == 1)
    assert is_answered(cluster)
