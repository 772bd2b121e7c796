"""Who has which block, now and at earlier times."""

from __future__ import annotations

from dynamo_vllm.console.decisions.block_map import BlockMap
from dynamo_vllm.console.decisions.messages import Block, Stored
from dynamo_vllm.console.decisions.shapes import DEVICE, DISK, HOST, Overlap, Worker

A, B = Worker(1), Worker(2)


def chain(before: int, block: int) -> int:
    return before * 1000 + block


def stored(*blocks: int, parent: int | None = None, engine: int = 0) -> Stored:
    """Blocks by their own hashes; the engine's hashes are these with a number in front."""
    return Stored([Block(engine + block, block) for block in blocks], parent)


def made(**more: int) -> BlockMap:
    found = BlockMap(chain, **more)
    for worker in (A, B):
        found.begin(worker, 0.0)
    return found


PROMPT = [1, 1002, 1002003, 1002003004]


def test_leading_blocks_of_each_worker_count() -> None:
    blocks = made()
    blocks.store(A, DEVICE, stored(1, 2, 3), 1.0)
    blocks.store(B, DEVICE, stored(1), 1.0)
    blocks.store(B, DEVICE, stored(7, 8), 1.0)
    assert blocks.overlaps(PROMPT) == {A: Overlap(3), B: Overlap(1)}
    assert blocks.overlaps([9]) == {}
    assert blocks.count == 6


def test_blocks_continue_those_that_an_engine_named_and_are_left_out_after_an_unknown_one() -> None:
    blocks = made()
    assert not blocks.store(A, DEVICE, stored(3, parent=52), 2.0)
    assert blocks.count == 0
    assert blocks.store(A, DEVICE, stored(1, 2, engine=50), 1.0)
    assert blocks.store(A, DEVICE, stored(3, parent=52, engine=50), 2.0)
    assert blocks.overlaps(PROMPT) == {A: Overlap(3)}


def test_run_goes_on_in_lower_tiers() -> None:
    blocks = made()
    blocks.store(A, DEVICE, stored(1), 1.0)
    blocks.store(A, HOST, stored(1, 2, 3), 1.0)
    blocks.store(B, DISK, stored(1, 2), 1.0)
    blocks.store(B, HOST, stored(1), 1.0)
    assert blocks.overlaps(PROMPT) == {A: Overlap(1, 2, 0), B: Overlap(0, 1, 1)}
    assert blocks.totals() == {A: Overlap(1, 3, 0), B: Overlap(0, 1, 2)}


def test_run_never_returns_to_a_nearer_tier() -> None:
    """The router looks from the end of the run in the nearer tier."""
    blocks = made()
    blocks.store(A, HOST, stored(1), 1.0)
    blocks.store(A, DEVICE, stored(1, 2), 1.0)
    blocks.remove(A, DEVICE, [1], 2.0)
    assert blocks.overlaps(PROMPT) == {A: Overlap(0, 1, 0)}


def test_removed_blocks_are_gone_from_one_tier_only() -> None:
    blocks = made()
    for tier in (DEVICE, HOST):
        blocks.store(A, tier, stored(1, 2), 1.0)
    blocks.remove(A, DEVICE, [2, 99], 2.0)
    assert blocks.overlaps(PROMPT) == {A: Overlap(1, 1, 0)}
    blocks.remove(A, HOST, [2], 3.0)
    assert (blocks.overlaps(PROMPT), blocks.count) == ({A: Overlap(1)}, 1)


def test_cleared_and_forgotten_workers_have_nothing() -> None:
    blocks = made()
    for worker in (A, B):
        blocks.store(worker, DEVICE, stored(1, 2), 1.0)
    blocks.clear(A, 2.0)
    blocks.forget(B, 2.0)
    assert (blocks.overlaps(PROMPT), blocks.count, blocks.workers) == ({}, 0, [A])


def test_bits_of_a_worker_that_left_are_not_those_of_the_next() -> None:
    blocks = made()
    blocks.store(A, DEVICE, stored(1, 2), 1.0)
    blocks.forget(A, 2.0)
    c = Worker(3)
    blocks.store(c, DEVICE, stored(1), 3.0)
    assert blocks.overlaps(PROMPT) == {c: Overlap(1)}
    assert blocks.overlaps(PROMPT, 1.5) == {A: Overlap(2)}
    assert (blocks.is_known(A, 1.5), blocks.is_known(A, 2.5)) == (True, False)


def test_past_states_can_be_asked_for() -> None:
    blocks = made()
    blocks.store(A, DEVICE, stored(1, 2), 1.0)
    blocks.store(B, DEVICE, stored(1, 2, 3), 2.0)
    blocks.remove(A, DEVICE, [2], 3.0)
    blocks.store(A, DEVICE, stored(2, parent=1), 4.0)
    states = [blocks.overlaps(PROMPT, at) for at in (0.5, 1.0, 2.5, 3.5, 9.0)]
    both = {A: Overlap(2), B: Overlap(3)}
    assert states == [{}, {A: Overlap(2)}, both, {A: Overlap(1), B: Overlap(3)}, both]
    assert blocks.changes_between(PROMPT, 1.5, 3.5) == [2.0, 3.0]
    assert blocks.is_known(A, 0.5)


def test_log_of_changes_is_bounded() -> None:
    blocks = made(most_changes=18)
    for number in range(100):
        blocks.store(A, DEVICE, stored(number + 1), float(number))
    assert not blocks.is_known(A, 80.0)
    assert blocks.is_known(A, 87.0)
    assert blocks.overlaps([88], 86.5) == {}, "what is still in the log is undone"


def test_oldest_blocks_are_forgotten_and_said_to_be() -> None:
    blocks = made(most_blocks=100)
    for number in range(101):
        blocks.store(A, DEVICE, stored(number + 1), float(number))
    assert blocks.count <= 100
    assert (blocks.overlaps([1]), blocks.overlaps([101])) == ({}, {A: Overlap(1)})
    assert not blocks.is_known(A, 101.0)
    blocks.begin(A, 102.0)
    assert blocks.is_known(A, 102.0)


def test_worker_in_doubt_is_not_known_until_it_is_read_again() -> None:
    blocks = made()
    blocks.doubt(A)
    assert not blocks.is_known(A, 5.0)
    blocks.store(A, DEVICE, stored(1, 2), None)
    blocks.begin(A, 6.0)
    assert (blocks.is_known(A, 5.0), blocks.is_known(A, 6.0)) == (False, True)
    assert blocks.changes_between(PROMPT, 0.0, 9.0) == []


def test_uses_move_up_when_a_block_goes() -> None:
    blocks = made()
    blocks.store(A, DEVICE, stored(1, 2), 1.0)
    blocks.use(PROMPT, 5.0)
    blocks.use([1, 77], 6.0)
    blocks.use([77], 7.0)
    blocks.remove(A, DEVICE, [2], 8.0)
    uses = blocks.tables()[2]
    assert uses == {1: (2, 6.0)}
