"""The operator's commands against real workers with the fake engine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import commands, served
from harness.adapters import make_adapter
from harness.stack import Stack, environment, stack
from harness.waiting import until
from runtime.conftest import fake

ASK = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "nvext": {"extra_fields": ["worker_id"]}}
FAILS = 7
SPECS = ({"ranks": 1}, {"ranks": 2})


@pytest.fixture(scope="module")
def deployment(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers, ready at the beginning and the end of every test; one has two ranks."""
    with stack(tmp_path_factory.mktemp("operate")) as made:
        made.start_frontend()
        for spec in SPECS:
            made.start_worker(*fake(model, token_ms=5, fail_on_token=FAILS, adapters=1, **spec))
        yield made.wait_ready()


def run(deployment: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    return commands.run(environment(deployment.folder), *words)


def told(deployment: Stack) -> list[dict[str, Any]]:
    """What every worker says of itself."""
    done = run(deployment, "status", deployment.url, "--json")
    assert done.returncode == 0, done.stderr
    workers: list[dict[str, Any]] = json.loads(done.stdout)["workers"]
    return workers


def answered_by(deployment: Stack) -> int:
    reply = deployment.post("/v1/completions", ASK)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["nvext"]["worker_id"]["decode_worker_id"])


def test_sleeping_worker_gets_no_requests_until_it_is_woken(deployment: Stack) -> None:
    asleep, awake = (worker["instance"] for worker in told(deployment))
    done = run(deployment, "sleep", "--worker", f"{asleep:x}", "--drain-seconds", "5")
    assert (done.returncode, done.stderr) == (0, "")
    assert [worker["state"] for worker in told(deployment)] == ["asleep", "ready"]
    assert {answered_by(deployment) for _ in range(6)} == {awake}
    again = run(deployment, "sleep", "--worker", "1")
    assert (again.returncode, again.stdout.split(": ")[1]) == (0, "already asleep\n")
    assert run(deployment, "wake", "--worker", "1").returncode == 0
    assert [worker["state"] for worker in told(deployment)] == ["ready", "ready"]
    until("the woken worker to answer", lambda: answered_by(deployment) == asleep)


def test_engine_is_told(deployment: Stack) -> None:
    for words in ("clear-kv", "reset-caches --kind prefix", "profile start --prefix p", "profile stop"):
        done = run(deployment, *words.split(), "--all")
        assert (done.returncode, done.stderr) == (0, ""), words


def test_status_follows_the_load(deployment: Stack) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4000, "stream": True}
    with deployment.openai.completions.create(**asked) as stream:
        next(iter(stream))

        def all_at_once() -> bool:
            workers = told(deployment)
            ranks = [rank for worker in workers for rank in worker["ranks"]]
            return (
                max(rank["tokens_per_second"] for rank in ranks) > 50
                and sum(rank["running"] for rank in ranks) == 1
                and sum(worker["in_flight"] for worker in workers) == 1
                and any(rank["hit_rate"] is not None for rank in ranks)
            )

        until("a worker at work", all_at_once)


def test_last_error_is_ours_and_not_the_clients(deployment: Stack) -> None:
    assert deployment.post("/v1/completions", {**ASK, "prompt": [FAILS, 1]}).status_code == 500
    assert deployment.post("/v1/completions", {**ASK, "prompt": [5, 99999]}).status_code == 400
    errors = [worker["last_error"]["message"] for worker in told(deployment) if worker["last_error"]]
    assert errors == ["the fake engine is set to fail on this prompt"]


def test_adapter_is_loaded_everywhere_and_unloaded(deployment: Stack, model: Path, tmp_path: Path) -> None:
    sql, other = (make_adapter(tmp_path / name, model, seed=n) for n, name in enumerate(("sql", "other")))
    loaded = run(deployment, "lora", "load", "sql", str(sql))
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert loaded.stdout.count(": loaded in ") == 2
    assert run(deployment, "lora", "load", "sql", str(sql)).stdout.count(": already loaded\n") == 2
    refused = run(deployment, "lora", "load", "other", str(other))
    assert (refused.returncode, refused.stderr.count("refused (409 no_room)")) == (1, 2)
    listed = run(deployment, "lora", "list").stdout
    assert [line.split()[1:3] for line in listed.splitlines()[1:3]] == [["sql", "loaded"]] * 2
    assert [[a["name"] for a in worker["adapters"]] for worker in told(deployment)] == [["sql"], ["sql"]]
    until("the frontend to list it", lambda: "sql" in deployment.models())
    assert run(deployment, "lora", "unload", "sql").stdout.count(": unloaded\n") == 2
    gone = run(deployment, "lora", "unload", "sql")
    assert (gone.returncode, gone.stderr.count("refused (404 adapter_unknown)")) == (1, 2)


def test_card_that_discovery_has_lost_does_not_keep_an_adapter(
    deployment: Stack, model: Path, tmp_path: Path
) -> None:
    assert run(deployment, "lora", "load", "sql", str(make_adapter(tmp_path, model))).returncode == 0
    for card in (deployment.folder / "discovery" / "v1" / "mdc").glob("*%2Fsql"):
        card.unlink()
    unloaded = run(deployment, "lora", "unload", "sql")
    assert (unloaded.returncode, unloaded.stderr) == (0, "")


# --- serve ------------------------------------------------------------------------------------------------


@pytest.fixture
def serving(model: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A `serve` on a free port, with a token; the environment that a command of the same user has."""
    env = served.own_environment(tmp_path) | {"DYN_VLLM_ADMIN_TOKEN": "geheim"}
    running = served.start(tmp_path, *fake(model), env=env)
    try:
        running.wait_ready()
        yield env
    finally:
        running.process.kill()


def test_the_serve_of_this_machine_needs_no_address(serving: dict[str, str]) -> None:
    status = json.loads(commands.output(serving, "status", "--json"))
    assert status["ready"] is True
    assert [worker["state"] for worker in status["workers"]] == ["ready"]
    assert [entry["address"] for entry in status["instances"]] == ["dynamo.backend.generate"]
    commands.output(serving, "clear-kv")

    wrong = {**serving, "DYN_VLLM_ADMIN_TOKEN": "falsch"}
    refused = commands.run(wrong, "clear-kv")
    assert (refused.returncode, refused.stderr.count("not_allowed")) == (1, 1)
    assert "geheim" not in refused.stderr
    assert " refuses " in commands.output(wrong, "status")
