"""Tests real engines with etcd and NATS: the same answers as with files and sockets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu.pairs import Pairs, pairs, prompts
from cpu.test_disaggregation import ask_all, assert_equal_and_nothing_computed_twice
from harness.planes import Planes, planes
from harness.processes import COMMAND
from harness.stack import Stack, stack
from harness.warm import Zygote

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planes]:
    with planes("etcd,nats,nats", tmp_path_factory.mktemp("servers")) as made:
        yield made


@pytest.fixture(scope="module")
def alone(
    cluster: Planes, warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("alone")
    with stack(folder, **cluster.env(folder)) as made:
        made.start_frontend()
        warm.start_worker(made, model)
        yield made.wait_ready(120)


@pytest.fixture(scope="module")
def pair(
    cluster: Planes, warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pairs]:
    folder = tmp_path_factory.mktemp("pair")
    env: dict[str, Any] = cluster.env(folder)
    with pairs(warm, model, folder, **env) as made:
        yield made


def texts(answers: list[Any]) -> list[str]:
    return [answer.choices[0].text for answer in answers]


def test_aggregated_answers_equal_those_on_files_and_sockets(alone: Stack, one_worker: Stack) -> None:
    every = prompts(20, 900)
    assert texts(ask_all(alone, every)) == texts(ask_all(one_worker, every))


def test_prefill_and_decode_equal_one_engine_and_nothing_is_computed_twice(pair: Pairs, alone: Stack) -> None:
    assert_equal_and_nothing_computed_twice(pair, alone, prompts(20, 900, seed=4))


def test_kv_events_reach_the_router_over_nats(alone: Stack) -> None:
    """A router with KV events knows only the caches that events reported."""
    done = subprocess.run(
        [*COMMAND, "check", "--live", alone.url, "--json", "--strict"],
        env=alone.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    steps = {step["name"]: step for step in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert steps["kv event"]["outcome"] == "ok", done.stdout
    assert steps["prefix cache"]["outcome"] == "ok", done.stdout
