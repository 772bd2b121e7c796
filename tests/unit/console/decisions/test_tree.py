"""The tree of cached prefixes."""

from __future__ import annotations

from typing import Any

from dynamo_vllm.console.decisions.block_map import BlockMap
from dynamo_vllm.console.decisions.messages import Block, Stored
from dynamo_vllm.console.decisions.shapes import DEVICE, HOST, Worker
from dynamo_vllm.console.decisions.tree import prefix_tree

A, B = Worker(0xA), Worker(0xB)


def store(blocks: BlockMap, worker: Worker, *hashes: int, tier: int = DEVICE) -> None:
    blocks.store(worker, tier, Stored([Block(one, one) for one in hashes]), 1.0)


def tree_of(blocks: BlockMap, most: int = 100) -> dict[str, Any]:
    return prefix_tree(*blocks.tables(), lambda worker: f"{worker.instance:x}", most)


def made() -> BlockMap:
    blocks = BlockMap(lambda before, block: before * 100 + block)
    store(blocks, A, 1, 2, 3)
    store(blocks, A, 1, 2, 4, 5)
    store(blocks, B, 1, 2, tier=HOST)
    store(blocks, B, 7)
    blocks.use([1, 102, 10203], 5.0)
    blocks.use([1, 102, 10204], 6.0)
    return blocks


def test_runs_end_where_prompts_differ() -> None:
    nodes = tree_of(made())["nodes"]
    shape = [(n["parent"], n["depth"], n["blocks"], n["used"]) for n in nodes]
    assert shape[0] == (None, 0, 2, 2)
    assert sorted(shape[1:], key=str) == [(0, 2, 1, 1), (0, 2, 2, 1), (None, 0, 1, 0)]
    assert nodes[0]["workers"] == {
        "a": {"device": 2, "host": 0, "disk": 0},
        "b": {"device": 0, "host": 2, "disk": 0},
    }
    assert nodes[-1]["last_used_seconds"] is None or nodes[-1]["used"]


def test_most_used_are_kept_with_all_above_them() -> None:
    found = tree_of(made(), most=2)
    assert found["left_out"] == 2
    first, second = found["nodes"]
    assert (first["id"], second["parent"]) == (0, 0)


def test_tree_has_no_hashes_and_may_be_empty() -> None:
    blocks = BlockMap(lambda before, block: before ^ block)
    store(blocks, A, 0xDEADBEEF0001, 0xDEADBEEF0002)
    assert str(0xDEADBEEF0001) not in str(tree_of(blocks))
    assert tree_of(BlockMap(lambda before, block: block)) == {"nodes": [], "left_out": 0}
