"""Finds the place of a process among the nodes of one engine, from vLLM's flags, read as vLLM reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# vLLM 0.30's own defaults.
LEADER = "127.0.0.1"
DATA_PARALLEL_PORT = 29550
MASTER_PORT = 29501


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One process of a worker. Ranks are data-parallel ranks, counted over all nodes."""

    is_headless: bool = False
    """It runs engines for a worker on another node."""
    serves_own_ranks: bool = False
    """A worker beside others that share one set of ranks: each serves only the ranks on its node."""
    all_ranks: int = 1
    first_rank: int = 0
    local_ranks: int = 1
    nodes_per_rank: int = 1
    """Above 1, the shards of one rank are on several nodes."""
    local_shards: int = 1
    """Of each rank, on this node."""
    node_rank: int = 0
    leader: str = LEADER
    port: int = DATA_PARALLEL_PORT
    """The rendezvous port on the leader; the ports after it are ours."""

    @property
    def remote_ranks(self) -> range:
        """Ranks on other nodes that this worker serves."""
        if self.is_headless or self.serves_own_ranks:
            return range(0)
        return range(self.local_ranks, self.all_ranks)

    @property
    def has_followers(self) -> bool:
        """Other nodes run engines for this worker, or shards of them."""
        is_first = self.node_rank == 0 and self.first_rank == 0 and not self.is_headless
        return is_first and (bool(self.remote_ranks) or self.nodes_per_rank > 1)

    @property
    def awaited(self) -> frozenset[str]:
        """The places that the nodes of this worker take, see `places`."""
        nodes = self.nodes_per_rank * -(-self.all_ranks // max(self.local_ranks, 1))
        shards = {f"node {number}" for number in range(1, nodes) if number % self.nodes_per_rank}
        return frozenset(shards | {f"rank {number}" for number in self.remote_ranks})

    @property
    def places(self) -> tuple[str, ...]:
        """Return what this node runs engines for: its ranks, or itself if it has only shards."""
        if not self.runs_ranks or self.all_ranks == 1:
            return (f"node {self.node_rank}",)
        return tuple(f"rank {self.first_rank + number}" for number in range(self.local_ranks))

    @property
    def runs_ranks(self) -> bool:
        """Return whether it has whole engines, not only shards of one that another node leads."""
        return self.node_rank % self.nodes_per_rank == 0

    @property
    def engines(self) -> int:
        """Return the number of processes with weights and a KV cache on this node; each has one GPU."""
        return self.local_ranks * self.local_shards

    @property
    def ports_in_a_row(self) -> int:
        """vLLM adds the rank to a first port."""
        return self.first_rank + self.local_ranks

    @property
    def link_port(self) -> int:
        return self.port + 1

    @property
    def event_port(self) -> int | None:
        """Return the first port of KV events if they come from several nodes, which must agree on it."""
        is_spread = self.local_ranks < self.all_ranks and not self.serves_own_ranks
        return self.port + 2 if is_spread else None

    @property
    def name(self) -> str:
        if not self.runs_ranks or self.all_ranks == 1:
            return f"node {self.node_rank}"
        last = self.first_rank + self.local_ranks - 1
        return f"rank {last}" if last == self.first_rank else f"ranks {self.first_rank} to {last}"


def from_flags(headless: bool, flags: Mapping[str, str | None]) -> Node:
    """Return the node that these flags describe; an invalid number counts as not given, vLLM rejects it."""
    ranks = _number(flags, "data_parallel_size") or 1
    nodes, node_rank = _number(flags, "nnodes") or 1, _number(flags, "node_rank") or 0
    local, start = _number(flags, "data_parallel_size_local"), _number(flags, "data_parallel_start_rank")
    own = _number(flags, "data_parallel_rank")
    one_each = own is not None or "data_parallel_external_lb" in flags
    few_each = "data_parallel_hybrid_lb" in flags
    headless = headless or (node_rank > 0 and start is None and not one_each and not few_each)
    shards = _shards(flags)
    # Nodes share all shards of all ranks evenly, in order.
    by_place = node_rank * (ranks * shards // nodes) // shards
    if one_each:
        local, first = 1, by_place if own is None else own
    else:
        if local is None and nodes > 1:
            local = max(ranks // nodes, 1)
        few_each = few_each or (start is not None and local is not None and not headless)
        first = start if start is not None and local is not None else by_place
    local = ranks if local is None else local
    nodes_per_rank = max(nodes // max(ranks // max(local, 1), 1), 1)
    port = ("data_parallel_rpc_port", DATA_PARALLEL_PORT) if ranks > 1 else ("master_port", MASTER_PORT)
    return Node(
        is_headless=headless or node_rank % nodes_per_rank > 0,
        serves_own_ranks=(one_each or few_each) and local < ranks,
        all_ranks=ranks,
        first_rank=first,
        local_ranks=local,
        nodes_per_rank=nodes_per_rank,
        local_shards=max(shards // nodes_per_rank, 1),
        node_rank=node_rank,
        leader=(flags.get("data_parallel_address") if ranks > 1 else None)
        or flags.get("master_addr")
        or LEADER,
        port=_number(flags, port[0]) or port[1],
    )


def _shards(flags: Mapping[str, str | None]) -> int:
    """Of one rank."""
    widths = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
    shards = 1
    for name in widths:
        shards *= _number(flags, name) or 1
    return shards


def _number(flags: Mapping[str, str | None], name: str) -> int | None:
    text = flags.get(name) or ""
    return int(text) if text.isdigit() else None
