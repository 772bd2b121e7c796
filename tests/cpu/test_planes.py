"""Tests real engines with etcd and NATS: the same answers as with files and sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu.completions import complete_all, texts
from cpu.pairs import Pairs, prompts
from cpu.stacks import Start, assert_events_reach_the_router
from cpu.test_disaggregation import assert_equal_and_nothing_computed_twice
from harness.planes import Planes, planes
from harness.stack import Stack

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planes]:
    with planes("etcd,nats,nats", tmp_path_factory.mktemp("servers")) as made:
        yield made


@pytest.fixture(scope="module")
def alone(cluster: Planes, start_module: Start) -> Stack:
    return start_module(settings=cluster.env(Path("alone")))


@pytest.fixture(scope="module")
def pair(cluster: Planes, start_module: Start) -> Pairs:
    return start_module.pair(settings=cluster.env(Path("pair")))


def test_aggregated_answers_equal_those_on_files_and_sockets(alone: Stack, one_worker: Stack) -> None:
    every = prompts(20, 900)
    assert texts(complete_all(alone, every, 12)) == texts(complete_all(one_worker, every, 12))


def test_prefill_and_decode_equal_one_engine_and_nothing_is_computed_twice(pair: Pairs, alone: Stack) -> None:
    assert_equal_and_nothing_computed_twice(pair, alone, prompts(20, 900, seed=4))


def test_kv_events_reach_the_router_over_nats(alone: Stack) -> None:
    assert_events_reach_the_router(alone)
