"""Tests which of two workers gets a prompt when one has it in its cache, in host memory or on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.engine.fake.cached_blocks import BLOCKS_PER_SEQUENCE, sequence
from dynamo_vllm.engine.fake.spec import CachedBlocks
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import another_frontend, fake

PROMPTS, BLOCK = 6, 32
CASES = {
    "only one has it in its cache": (["GPU"], [], 0, 1.0),
    "only one has it in host memory": ([], ["CPU"], 1, 0.75),
    "only one has it on disk": (["STORAGE"], [], 0, 0.25),
    "a cache is nearer than host memory": (["CPU"], ["GPU"], 1, 1.0),
    "host memory is nearer than a disk": (["CPU"], ["STORAGE"], 0, 0.75),
    "it left the cache for host memory": (["GPU", "CPU", "-GPU"], ["STORAGE"], 0, 0.75),
    "it left host memory for the disk": (["CPU", "STORAGE", "-CPU"], [], 0, 0.25),
    "it left the cache and host memory": (["GPU", "CPU", "-CPU", "-GPU"], ["STORAGE"], 1, 0.25),
}
"""What each of two workers announces in this order, - is a removal; who gets the prompts, and the weight."""


class Two:
    """A deployment of two workers; each case has prompts of its own."""

    def __init__(self, made: Stack, model: Path) -> None:
        self.made = made
        self.workers = [self._start(model, side) for side in (0, 1)]

    def _start(self, model: Path, side: int) -> int:
        """Start a worker with the blocks of all cases, and return its id."""
        cached = [
            {
                "count": PROMPTS * BLOCKS_PER_SEQUENCE,
                "first": number * PROMPTS,
                "medium": word.removeprefix("-"),
                "removed": word.startswith("-"),
            }
            for number, case in enumerate(CASES.values())
            for word in case[:2][side]
        ]
        before = {instance["instance_id"] for instance in self.made.instances()}
        self.made.start_worker(*fake(model, block_size=BLOCK, cached=cached))
        self.made.wait_ready()
        (new,) = {int(instance["instance_id"]) for instance in self.made.instances()} - before
        return new

    def assert_goes_to(self, case: str, side: int, weight: float, made: Stack | None = None) -> None:
        made, first = made or self.made, list(CASES).index(case) * PROMPTS
        until("the router to know", lambda: {rate for _, rate in ask(made, first)} == {weight})
        assert ask(made, first) == [(self.workers[side], weight)] * PROMPTS


def ask(made: Stack, first: int) -> list[tuple[int, float]]:
    """Return for each prompt which worker got it, and the share that the router took for cached there."""
    found = []
    for number in range(PROMPTS):
        ids = sequence(CachedBlocks(count=1, first=first), number, 8 * BLOCK)
        body: dict[str, Any] = {"model": "tiny", "prompt": [*ids, 7], "max_tokens": 1}
        body["nvext"] = {"extra_fields": ["worker_id", "timing"]}
        told = made.post("/v1/completions", body).json()["nvext"]
        rate = float(told["timing"]["kv_hit_rate"]) * 9 / 8  # the last block is nowhere cached
        found.append((int(told["worker_id"]["decode_worker_id"]), round(rate, 3)))
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Two]:
    with stack(tmp_path_factory.mktemp("two")) as made:
        made.start_frontend()
        yield Two(made, model)


@pytest.mark.parametrize("case", CASES)
def test_prompt_goes_where_it_is_nearest(two: Two, case: str) -> None:
    *_, side, weight = CASES[case]
    two.assert_goes_to(case, side, weight)


def test_frontend_that_starts_late_learns_of_all_tiers(two: Two) -> None:
    with another_frontend(two.made, name="late") as late:
        for case, (_, _, side, weight) in CASES.items():
            two.assert_goes_to(case, side, weight, late)


def test_weights_decide_between_tiers(two: Two) -> None:
    words = ("--router-host-cache-weight", "0.2", "--router-disk-cache-weight", "0.9")
    with another_frontend(two.made, *words, name="weights") as weighing:
        two.assert_goes_to("host memory is nearer than a disk", 1, 0.9, weighing)
        two.assert_goes_to("it left the cache for host memory", 1, 0.9, weighing)
        two.assert_goes_to("only one has it in host memory", 1, 0.2, weighing)
