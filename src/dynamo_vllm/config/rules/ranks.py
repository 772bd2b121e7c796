"""Rules for KV events, data-parallel ranks and nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.config import nodes
from dynamo_vllm.config.rules import flags
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.rules.flags import EngineFlags


def node_of(o: WorkerOptions, engine: EngineFlags) -> nodes.Node:
    return nodes.from_flags(o.headless, engine)


def _written_event_endpoint(engine: EngineFlags) -> str:
    written = engine.get("kv_events_config")
    return str(flags.json_object("--kv-events-config", written).get("endpoint", "")) if written else ""


def kv_event_port_is_registered(o: WorkerOptions, _: EngineFlags) -> None:
    if o.kv_event_port is not None and not 1024 <= o.kv_event_port <= 49151:
        raise ConfigError(f"DYN_VLLM_KV_EVENT_PORT={o.kv_event_port} is out of range; use 1024 to 49151")


def kv_events_have_one_source(o: WorkerOptions, engine: EngineFlags) -> None:
    if "kv_events_config" in engine and (o.kv_event_port is not None or o.kv_events is not None):
        raise ConfigError(
            "--kv-events-config already configures KV events; leave --kv-event-port/--kv-events out"
        )


def kv_events_can_be_read(o: WorkerOptions, engine: EngineFlags) -> None:
    node, endpoint = node_of(o, engine), _written_event_endpoint(engine)
    listens = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
    if node.is_headless and node.event_port and endpoint and listens:
        raise ConfigError(
            f"--kv-events-config: {endpoint} can be read on this node only; write tcp://{node.leader}:PORT, "
            "with the leader's port"
        )
    if not node.is_headless and not listens:
        raise ConfigError(
            f"--kv-events-config: vLLM connects to {endpoint} instead of listening and no event arrives; "
            "write tcp://*:PORT"
        )


def kv_events_of_each_rank_have_a_port(o: WorkerOptions, engine: EngineFlags) -> None:
    endpoint = _written_event_endpoint(engine)
    if endpoint.startswith("ipc://") and node_of(o, engine).all_ranks > 1:
        raise ConfigError(
            f"--kv-events-config: {endpoint} is one address for several ranks; write tcp://*:PORT, "
            "each rank adds its number"
        )


_BALANCERS = {
    "--data-parallel-external-lb": ("data_parallel_rank", "data_parallel_external_lb"),
    "--data-parallel-hybrid-lb": ("data_parallel_hybrid_lb",),
}
"""Ways to distribute ranks among workers, and their flags."""


def ranks_are_distributed_one_way(o: WorkerOptions, engine: EngineFlags) -> None:
    asked = [way for way, names in _BALANCERS.items() if set(names) & set(engine)]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are different ways to distribute ranks; give one of them")
    if asked and o.headless:
        raise ConfigError(
            f"--headless cannot be combined with {asked[0]} (or --data-parallel-rank), with which each node "
            "serves its own ranks; leave --headless out, or write --data-parallel-start-rank"
        )


def one_worker_per_process(_: WorkerOptions, engine: EngineFlags) -> None:
    if "data_parallel_multi_port_external_lb" in engine:
        raise ConfigError(
            "--data-parallel-multi-port-external-lb starts several servers in one process; start one worker "
            "per rank with --data-parallel-rank"
        )


def node_rank_is_one_of_the_nodes(_: WorkerOptions, engine: EngineFlags) -> None:
    count, rank = engine.get("nnodes") or "1", engine.get("node_rank") or "0"
    if count.isdigit() and rank.isdigit() and int(rank) >= int(count):
        fix = f"use 0 to {int(count) - 1}" if int(count) > 1 else "give the number of nodes with --nnodes"
        raise ConfigError(f"--node-rank {rank} is out of range for --nnodes {count}; {fix}")


def headless_belongs_to_a_worker(o: WorkerOptions, engine: EngineFlags) -> None:
    if not o.headless:
        return
    node = node_of(o, engine)
    if node.all_ranks == 1 and node.node_rank == 0:
        raise ConfigError(
            "--headless runs engines for a worker on another node; name its place: --nnodes N --node-rank "
            "1, or "
            "--data-parallel-size N --data-parallel-size-local 1 --data-parallel-start-rank 1"
        )


def start_rank_needs_a_count(_: WorkerOptions, engine: EngineFlags) -> None:
    # vLLM 0.30 ignores the start rank without it, and the leader waits forever.
    if "data_parallel_start_rank" in engine and "data_parallel_size_local" not in engine:
        raise ConfigError(
            f"--data-parallel-start-rank {engine['data_parallel_start_rank']} needs "
            "--data-parallel-size-local, the number of ranks on this node"
        )


def ranks_of_a_node_are_among_all(o: WorkerOptions, engine: EngineFlags) -> None:
    node = node_of(o, engine)
    if node.first_rank + node.local_ranks > node.all_ranks:
        raise ConfigError(
            f"this node has {node.local_ranks} ranks from rank {node.first_rank} on, of "
            f"--data-parallel-size {node.all_ranks}; set --data-parallel-size to the ranks of all nodes"
        )


def several_nodes_name_their_leader(o: WorkerOptions, engine: EngineFlags) -> None:
    node = node_of(o, engine)
    name = "data_parallel_address" if node.all_ranks > 1 else "master_addr"
    if (node.is_headless or node.has_followers) and not {name, "master_addr"} & set(engine):
        raise ConfigError(
            f"several nodes need the address of their leader; add {flags.flag(name)} ADDRESS on every node"
        )


def events_of_other_nodes_reach_the_leader(o: WorkerOptions, engine: EngineFlags) -> None:
    # vLLM 0.30 takes any address with :: for one to listen on.
    node = node_of(o, engine)
    if node.event_port and ":" in node.leader and o.kv_events is not False:
        raise ConfigError(
            f"KV events of other nodes cannot be sent to {node.leader}; give an IPv4 address of the leader, "
            "or add --no-kv-events"
        )


RULES = (
    kv_event_port_is_registered,
    kv_events_have_one_source,
    kv_events_can_be_read,
    kv_events_of_each_rank_have_a_port,
    ranks_are_distributed_one_way,
    one_worker_per_process,
    node_rank_is_one_of_the_nodes,
    headless_belongs_to_a_worker,
    start_rank_needs_a_count,
    ranks_of_a_node_are_among_all,
    several_nodes_name_their_leader,
    events_of_other_nodes_reach_the_leader,
)
