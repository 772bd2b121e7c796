"""Where a process stands among several, from vLLM's flags."""

from __future__ import annotations

import pytest

from dynamo_vllm.config import nodes
from dynamo_vllm.config.nodes import Node
from dynamo_vllm.config.rules.flags import engine_flags

AT = ["-dpa", "10.0.0.1"]
TP = ["-tp", "2", "--nnodes", "2", "--master-addr", "10.0.0.1"]


def node(*argv: str, headless: bool = False) -> Node:
    return nodes.from_flags(headless, engine_flags(argv))


def test_one_process_has_everything() -> None:
    found, ranks = node(), node("-dp", "4")
    assert (found.is_headless, found.has_followers, found.event_port) == (False, False, None)
    assert (found.ports_in_a_row, found.name) == (1, "node 0")
    assert (ranks.local_ranks, ranks.remote_ranks, ranks.has_followers) == (4, range(4, 4), False)
    assert (ranks.ports_in_a_row, ranks.event_port) == (4, None)
    assert node("-dp", "many", "--nnodes", "x") == node(), "what is no number is left to vLLM"


def test_every_shard_of_every_rank_of_a_node_is_an_engine() -> None:
    for words, engines in {
        "": 1,
        "-dp 4": 4,
        "-tp 2 -pp 3": 6,
        "-tp 2 -pcp 2": 4,
        "-dp 4 -dpl 1 -tp 2 -dpa 10.0.0.1": 2,
        "-tp 4 --nnodes 2 --master-addr 10.0.0.1": 2,
        "-tp x": 1,
    }.items():
        assert node(*words.split()).engines == engines, words


def test_leader_answers_for_ranks_on_other_nodes() -> None:
    found = node("-dp", "4", "-dpl", "1", *AT)
    assert (found.is_headless, found.remote_ranks, found.has_followers) == (False, range(1, 4), True)
    assert (found.leader, found.port) == ("10.0.0.1", 29550)
    assert (found.link_port, found.event_port) == (29551, 29552)


def test_headless_node_has_its_ranks_and_the_same_ports() -> None:
    found = node("-dp", "4", "-dpl", "2", "-dpr", "2", *AT, "-dpp", "4000", headless=True)
    assert (found.is_headless, found.first_rank, found.local_ranks) == (True, 2, 2)
    assert (found.runs_ranks, found.has_followers, found.remote_ranks) == (True, False, range(0))
    assert (found.leader, found.link_port, found.event_port) == ("10.0.0.1", 4001, 4002)
    assert found.name == "ranks 2 to 3"


def test_node_rank_above_0_is_headless_without_being_told() -> None:
    leader, other = node(*TP, "--node-rank", "0"), node(*TP, "--node-rank", "1")
    assert (leader.is_headless, leader.has_followers, leader.runs_ranks) == (False, True, True)
    assert (other.is_headless, other.has_followers, other.runs_ranks) == (True, False, False)
    assert (other.name, other.leader, other.link_port) == ("node 1", "10.0.0.1", 29502)
    assert leader.event_port is other.event_port is None, "the one rank's scheduler is on the leader"


def test_nodes_share_ranks_out_in_their_order() -> None:
    found = node("-dp", "4", "-r", "1", "-n", "2", "--master-addr", "10.0.0.1")
    assert (found.is_headless, found.first_rank, found.local_ranks, found.runs_ranks) == (True, 2, 2, True)


def test_shards_of_two_ranks_over_four_nodes() -> None:
    places = [
        node("-dp", "2", "-tp", "2", "-n", "4", "-r", str(rank), "--master-addr", "10.0.0.1")
        for rank in range(4)
    ]
    assert [place.nodes_per_rank for place in places] == [2] * 4
    assert [place.first_rank for place in places] == [0, 0, 1, 1]
    assert [place.runs_ranks for place in places] == [True, False, True, False]
    assert [place.is_headless for place in places] == [False, True, True, True]
    assert [place.has_followers for place in places] == [True, False, False, False]


@pytest.mark.parametrize(
    ("argv", "first", "local"),
    [
        (["-dp", "2", "--data-parallel-rank", "1", *AT], 1, 1),
        (["-dp", "2", "--data-parallel-external-lb", "-n", "2", "-r", "1", *AT], 1, 1),
        (["-dp", "4", "-dpl", "2", "-dpr", "2", "--data-parallel-hybrid-lb", *AT], 2, 2),
        (["-dp", "4", "-dpl", "2", "-dpr", "2", *AT], 2, 2),
    ],
)
def test_worker_beside_others_serves_its_own_ranks(argv: list[str], first: int, local: int) -> None:
    found = node(*argv)
    assert (found.is_headless, found.serves_own_ranks, found.has_followers) == (False, True, False)
    assert (found.first_rank, found.local_ranks, found.event_port) == (first, local, None)
    assert found.ports_in_a_row == first + local


ELSEWHERE = ("-dp", "8", "-dpl", "2", *AT)


@pytest.mark.parametrize(
    ("leader", "others"),
    [
        (node(*ELSEWHERE), [node(*ELSEWHERE, "-dpr", n, headless=True) for n in "246"]),
        (node(*ELSEWHERE), [node("-dp", "8", "-dpl", "6", "-dpr", "2", *AT, headless=True)]),
        (node(*TP), [node(*TP, "--node-rank", "1")]),
        *(
            (node(*flags, "-r", "0"), [node(*flags, "-r", str(n)) for n in range(1, count)])
            for flags, count in (
                (("-dp", "4", "-n", "2", *TP[-2:]), 2),
                (("-dp", "2", "-tp", "2", "-n", "4", *TP[-2:]), 4),
                (("-dp", "4", "-tp", "2", "-n", "2", *TP[-2:]), 2),
                (("-tp", "16", "-pp", "2", "-n", "4", *TP[-2:]), 4),
            )
        ),
    ],
)
def test_worker_awaits_the_places_of_its_nodes_and_no_other(leader: Node, others: list[Node]) -> None:
    assert leader.has_followers
    taken = [place for other in others for place in other.places]
    assert len(taken) == len(set(taken))
    assert set(taken) == leader.awaited
