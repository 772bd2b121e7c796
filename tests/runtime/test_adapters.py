"""Adapters in discovery and in the frontend's eyes, with the fake engine."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from dynamo_vllm.config import addresses
from harness import commands, served
from harness.adapters import make_adapter
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from runtime.conftest import fake


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), model)


@pytest.fixture(scope="module")
def two(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Both have an adapter sql from their start; its card is there when they are ready."""
    with stack(tmp_path_factory.mktemp("adapters")) as made:
        made.start_frontend()
        for _ in range(2):
            worker = start(made, model, f"sql={folder}")
            until("ready", worker.is_ready)
            assert len(cards(made)) == len(made.workers)
        yield made.wait_ready()


def start(made: Stack, model: Path, *modules: str, **spec: int) -> Worker:
    words = fake(model, **{"adapters": 4, "token_ms": 5, **spec})
    return made.start_worker(*words, "--lora-enabled", "--lora-modules", *modules)


def cards(made: Stack) -> list[str]:
    """Of adapters: the last part of the key."""
    found = [path.name.split("%2F") for path in (made.folder / "discovery" / "v1" / "mdc").iterdir()]
    return sorted(parts[4] for parts in found if len(parts) > 4)


def load(worker: Worker, name: str, uri: Path) -> httpx.Response:
    return worker.admin("load_lora", lora_name=name, source={"uri": str(uri)})


def answered_by(made: Stack, model: str, number: int = 5) -> int:
    body = {"model": model, "prompt": [number] * 40, "max_tokens": 20}
    reply = made.post("/v1/completions", {**body, "nvext": {"extra_fields": ["worker_id"]}})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["nvext"]["worker_id"]["decode_worker_id"])


def test_requests_for_an_adapter_go_to_every_worker_that_has_it(two: Stack, folder: Path) -> None:
    assert load(two.workers[0], "solo", folder).status_code == 200
    until("the adapter", lambda: "solo" in two.models())
    with ThreadPoolExecutor(8) as pool:
        both = Counter(pool.map(lambda number: answered_by(two, "sql", 10 + number), range(40)))
        alone = set(pool.map(lambda number: answered_by(two, "solo", 10 + number), range(20)))
    assert len(both) == 2
    assert len(alone) == 1
    assert two.workers[0].admin("unload_lora", lora_name="solo").status_code == 200


def test_longest_name_that_file_discovery_has_room_for_is_listed(two: Stack, folder: Path) -> None:
    """Its key is the name of a file, where each character but letters and digits takes three bytes."""
    worker, room = two.workers[0], addresses.adapter_room("dynamo.backend.generate")
    longest = "x-" * (room // 4) + "x" * (room % 4)
    assert load(worker, longest, folder).status_code == 200
    until("the adapter", lambda: longest in two.models())
    answered_by(two, longest)
    refused = load(worker, f"{longest}x", folder)
    assert (refused.status_code, refused.json()["error"]) == (400, "bad_command")
    assert f"takes {room + 1} bytes" in refused.json()["message"]
    assert worker.admin("unload_lora", lora_name=longest).status_code == 200


def test_names_that_are_one_to_discovery_do_not_meet(two: Stack, folder: Path) -> None:
    """The runtime takes a.b and A_B for one; the second would take the first one's card away."""
    worker, before = two.workers[0], cards(two)
    assert load(worker, "a.b", folder).status_code == 200
    for name in ("a_b", "A.B", "_a.b", "a/b"):
        refused = load(worker, name, folder)
        assert (refused.status_code, refused.json()["error"]) == (409, "adapter_conflict")
        assert "'a.b'" in refused.json()["message"]
    assert len(cards(two)) == len(before) + 1
    until("the adapter", lambda: "a.b" in two.models())
    answered_by(two, "a.b")
    assert load(worker, "_", folder).status_code == 400, "it has the base model's own key"
    assert worker.admin("unload_lora", lora_name="a.b").status_code == 200
    answered_by(two, "tiny")


def test_worker_that_cannot_have_its_adapters_does_not_start(model: Path, tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        worker = start(made, model, f"sql={tmp_path}/nowhere")
        assert worker.process.wait(60) == 1
        (line,) = [line for line in worker.log.read_text().splitlines() if line.startswith("error: ")]
        assert f"--lora-modules sql={tmp_path}/nowhere" in line and "No such file or directory" in line


def start_slowly(made: Stack, model: Path, folder: Path, **spec: int) -> Worker:
    """It is listed, and takes requests, while the engine takes its first adapter."""
    made.start_frontend()
    worker = start(made, model, f"sql={folder}", adapters=1, adapter_ms=120_000, **spec)
    until("the model", lambda: made.get("/health").status_code == 200 and len(made.instances()) == 1)
    assert not worker.is_ready()
    return worker


def test_signal_while_the_first_adapters_load_drains_what_runs(
    model: Path, folder: Path, tmp_path: Path
) -> None:
    body = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 60}
    with stack(tmp_path) as made, ThreadPoolExecutor(1) as pool:
        worker = start_slowly(made, model, folder, token_ms=30)
        asking = pool.submit(made.post, "/v1/completions", body)
        until("a running request", lambda: worker.metric("dynamo_component_requests_in_flight") == 1)
        worker.signal(signal.SIGTERM)
        answer = asking.result(60)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 60)
        assert worker.process.wait(60) == 0


def test_replaced_worker_of_serve_has_its_adapters_again(model: Path, folder: Path, tmp_path: Path) -> None:
    env = served.own_environment(tmp_path)
    words = fake(model, adapters=4)
    serving = served.start(tmp_path, *words, "--lora-enabled", "--lora-modules", f"sql={folder}", env=env)
    try:
        serving.wait_ready()
        first = adapters(env)
        assert list(first.values()) == [["sql"]]
        (pid,) = workers(serving.process.pid)
        psutil.Process(pid).kill()
        until("another worker", lambda: adapters(env).keys() - first.keys())
        assert [found for instance, found in adapters(env).items() if instance not in first] == [["sql"]]
    finally:
        serving.process.kill()


def workers(pid: int) -> list[int]:
    below = psutil.Process(pid).children(recursive=True)
    return [process.pid for process in below if "worker" in process.cmdline()]


def adapters(env: dict[str, str]) -> dict[int, list[str]]:
    """What each worker of the only `serve` says."""
    done = commands.run(env, "status", "--json")
    found = json.loads(done.stdout)["workers"] if done.returncode == 0 else []
    return {w["instance"]: [a["name"] for a in w["adapters"]] for w in found if w.get("state") == "ready"}
