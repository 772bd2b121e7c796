"""Makes the tree of cached prefixes from the block map: runs of blocks, who has them, how often used."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from typing import TYPE_CHECKING

from dynamo_vllm.console.decisions.block_map import tiers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from dynamo_vllm.console.decisions.block_map import Use
    from dynamo_vllm.console.decisions.shapes import Worker

MOST_NODES = 2000
NAMES = ("device", "host", "disk")


class _Run:
    """Blocks that all prompts with the first of them continue with."""

    __slots__ = ("above", "below", "blocks", "depth", "last", "masks", "uses")

    def __init__(self, above: _Run | None, depth: int) -> None:
        self.above = above
        self.depth = depth
        self.below: list[_Run] = []
        self.blocks = 0
        self.masks: Counter[int] = Counter()
        self.uses = 0
        self.last = 0.0


def prefix_tree(
    masks: Mapping[int, int],
    parents: Mapping[int, int],
    uses: Mapping[int, Use],
    workers: Mapping[int, Worker],
    name: Callable[[Worker], str],
    most: int = MOST_NODES,
) -> dict[str, Any]:
    """Return the nodes in an order in which each comes after the one above it.

    Blocks whose predecessor is gone are left out: no prompt can use them.
    """
    runs = _runs(masks, parents, uses)
    chosen = _most_used(runs, most)
    now = time.time()
    numbers = {id(run): number for number, run in enumerate(chosen)}
    nodes = [
        {
            "id": number,
            "parent": None if run.above is None else numbers[id(run.above)],
            "blocks": run.blocks,
            "depth": run.depth,
            "workers": _holders(run, workers, name),
            "used": run.uses,
            "last_used_seconds": round(max(0.0, now - run.last), 1) if run.last else None,
        }
        for number, run in enumerate(chosen)
    ]
    return {"nodes": nodes, "left_out": len(runs) - len(chosen)}


def _runs(masks: Mapping[int, int], parents: Mapping[int, int], uses: Mapping[int, Use]) -> list[_Run]:
    """Return all runs, each after the one above it."""
    next_blocks: dict[int, list[int]] = {}
    for here, parent in parents.items():
        next_blocks.setdefault(parent, []).append(here)
    found: list[_Run] = []
    todo: list[tuple[_Run | None, int, int]] = [(None, 0, first) for first in next_blocks.get(0, ())]
    while todo:
        above, depth, here = todo.pop()
        run = _Run(above, depth)
        found.append(run)
        if above is not None:
            above.below.append(run)
        while True:
            run.blocks += 1
            run.masks[masks.get(here, 0)] += 1
            if here in uses:
                run.uses += uses[here].times
                run.last = max(run.last, uses[here].last)
            after = next_blocks.get(here, ())
            if len(after) != 1:
                break
            (here,) = after
        todo += [(run, depth + run.blocks, block) for block in after]
    for run in reversed(found):
        for below in run.below:
            run.uses += below.uses
            run.last = max(run.last, below.last)
    return found


def _most_used(runs: list[_Run], most: int) -> list[_Run]:
    """Choose from the top down, the most used and then the longest first."""
    waiting = [(-run.uses, -run.blocks, number, run) for number, run in enumerate(runs) if run.above is None]
    heapq.heapify(waiting)
    number = len(runs)
    chosen: list[_Run] = []
    while waiting and len(chosen) < most:
        run = heapq.heappop(waiting)[3]
        chosen.append(run)
        for below in run.below:
            number += 1
            heapq.heappush(waiting, (-below.uses, -below.blocks, number, below))
    return chosen


def _holders(
    run: _Run, workers: Mapping[int, Worker], name: Callable[[Worker], str]
) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for slot, counts in sorted(tiers_of(run.masks).items()):
        if slot in workers:
            shown = found.setdefault(name(workers[slot]), dict.fromkeys(NAMES, 0))
            for word, count in zip(NAMES, counts, strict=True):
                shown[word] += count
    return found
