"""Tests one worker on several nodes, here processes on loopback: answers, events, and shutdown."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import pytest

from cpu.completions import complete, texts
from cpu.ranks import PROMPTS, assert_repeats_hit, core, expected_texts
from cpu.stacks import Start
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.export import workload
from harness import listening
from harness.processes import free_ports, survivors
from harness.stack import Stack, Worker
from harness.waiting import until

pytestmark = pytest.mark.more

# In no deployment, it must not need the service that holds one together.
HEADLESS = ("--headless", "--data-parallel-start-rank", "1", "--discovery-backend", "etcd")


def ranks_flags(ranks: int, local: int) -> list[str]:
    """Returns the flags that all nodes of these ranks share."""
    flags = ["--data-parallel-size", str(ranks), "--data-parallel-size-local", str(local)]
    return [*flags, "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_ports(8))]


def shards_flags() -> list[str]:
    flags = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", "--nnodes", "2"]
    return [*flags, "--master-addr", "127.0.0.1", "--master-port", str(free_ports(8))]


@dataclass
class Nodes:
    """Is a worker and the node that runs engines for it."""

    stack: Stack
    worker: Worker
    other: Worker

    def below(self) -> list[psutil.Process]:
        pids = (self.worker.pid, self.other.pid)
        return [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]


def nodes(start: Start, leader: Sequence[str], other: Sequence[str]) -> Nodes:
    made = start.frontend()
    node = start.warm.start_node(made, start.model, *other)
    worker = start.warm.start_worker(made, start.model, *leader)
    made.wait_ready(120)
    until("a ready node", node.is_ready)
    return Nodes(made, worker, node)


@pytest.fixture
def two_ranks(start: Start) -> Nodes:
    flags = ranks_flags(2, 1)
    return nodes(start, flags, [*flags, *HEADLESS])


@pytest.fixture
def two_shards(start: Start) -> Nodes:
    flags = shards_flags()
    return nodes(start, flags, [*flags, "--node-rank", "1"])


def test_ranks_on_two_nodes_are_routed_to_and_answer_like_one_engine(
    two_ranks: Nodes, one_worker: Stack
) -> None:
    first = assert_repeats_hit(two_ranks.stack, {0, 1})
    assert texts(first) == expected_texts(one_worker)
    assert len(two_ranks.stack.instances()) == 1, "the headless node is not in discovery"
    assert "serving no endpoint; engines of rank 1" in two_ranks.other.log.read_text()
    until("loopback only", lambda: listening.for_other_machines(two_ranks.stack.pids()) == [])


def exported_flags(rank: int, port: int) -> list[str]:
    """Returns the flags of a pod of two from `export k8s`; the leader has a host name, not an address."""
    group = WorkerGroup(args=("--data-parallel-size", "2", "--data-parallel-size-local", "1"))
    (made,) = workload.of_cluster(Topology(model="org/model", workers=(group,)), "kubernetes").workers
    said = {workload.LEADER: "localhost", "$(NODE_RANK)": str(rank)}
    flags = [said.get(word, word) for word in made.args if word not in ("worker", "--model=org/model")]
    return [*flags, "--data-parallel-rpc-port", str(port)]


@pytest.mark.long
def test_nodes_as_exported_share_their_ranks_by_pod_number(start: Start, one_worker: Stack) -> None:
    port = free_ports(8)
    made = nodes(start, exported_flags(0, port), exported_flags(1, port))
    assert texts(assert_repeats_hit(made.stack, {0, 1})) == expected_texts(one_worker)
    assert "serving no endpoint; engines of rank 1" in made.other.log.read_text()


def test_headless_node_leaves_on_sigterm_and_its_worker_follows(two_ranks: Nodes) -> None:
    below = two_ranks.below()
    two_ranks.other.signal(signal.SIGTERM)
    assert two_ranks.other.process.wait(60) == 0
    assert two_ranks.worker.process.wait(60) == 3
    assert "lost the connection to rank 1" in two_ranks.worker.log.read_text()
    assert survivors(below) == []


def test_killed_rank_on_the_other_node_ends_both(two_ranks: Nodes) -> None:
    below = two_ranks.below()
    core(two_ranks.other, 1).kill()
    assert two_ranks.other.process.wait(60) == 3
    assert two_ranks.worker.process.wait(60) == 3
    assert survivors(below) == []


def test_killed_worker_ends_the_headless_node(two_ranks: Nodes) -> None:
    below = two_ranks.below()
    two_ranks.worker.signal(signal.SIGKILL)
    assert two_ranks.other.process.wait(60) == 3
    assert survivors(below) == []


def assert_three_answers_equal(made: Stack, alone: Stack) -> None:
    answers, expected = ([complete(each, prompt).text for prompt in PROMPTS[:3]] for each in (made, alone))
    assert answers == expected


@pytest.mark.parametrize(
    ("number", "ends", "code_of_worker", "code_of_other"),
    [
        (signal.SIGKILL, "other", 3, -signal.SIGKILL),
        pytest.param(signal.SIGTERM, "worker", 0, 3, marks=pytest.mark.long),
    ],
)
def test_shards_on_two_nodes_answer_like_one_and_end_together(
    two_shards: Nodes, one_worker: Stack, number: int, ends: str, code_of_worker: int, code_of_other: int
) -> None:
    assert_three_answers_equal(two_shards.stack, one_worker)
    assert len(two_shards.stack.instances()) == 1
    below = two_shards.below()
    getattr(two_shards, ends).signal(number)
    assert two_shards.worker.process.wait(60) == code_of_worker
    assert two_shards.other.process.wait(60) == code_of_other
    assert survivors(below) == []


@pytest.mark.long
def test_shards_in_one_worker_answer_like_one_and_end_with_it_when_it_is_killed(
    start: Start, one_worker: Stack
) -> None:
    made = start("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    assert_three_answers_equal(made, one_worker)
    below = psutil.Process(made.workers[0].pid).children(recursive=True)
    made.workers[0].signal(signal.SIGKILL)
    assert survivors(below) == []


@pytest.mark.long
def test_workers_that_share_ranks_out_each_serve_their_own(start: Start, one_worker: Stack) -> None:
    flags, made = [*ranks_flags(4, 2), "--data-parallel-hybrid-lb"], start.frontend()
    start.warm.start_worker(made, start.model, *flags)
    start.warm.start_worker(made, start.model, *flags, "--data-parallel-start-rank", "2")
    assert_repeats_hit(made.wait_ready(120), {0, 1, 2, 3})
    name = "dynamo_component_total_blocks"
    one = one_worker.workers[0].metric(name)
    blocks = [[worker.metric(name, dp_rank=r) for r in range(4)] for worker in made.workers]
    assert blocks == [[one, one, 0, 0], [0, 0, one, one]]
