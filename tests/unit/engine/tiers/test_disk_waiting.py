"""How much waiting requests may want from disk at a time."""

from __future__ import annotations

import pytest

from dynamo_vllm.engine.tiers.disk_waiting import FIRST_RATE, DiskWaiting


def key(number: int) -> bytes:
    return bytes([number])


def told(waiting: DiskWaiting, asker: str, *numbers: int) -> list[bool]:
    return [waiting.admits(key(number), asker) for number in numbers]


@pytest.fixture
def waiting() -> DiskWaiting:
    return DiskWaiting(rows=9, chunk_bytes=4096, most_seconds=2.0)


def test_all_together_want_no_more_than_their_share_of_host_memory(waiting: DiskWaiting) -> None:
    assert told(waiting, "a", 1, 2, 3, 4) == [True] * 4
    assert told(waiting, "b", 5, 6, 7) == [True, True, False]
    assert told(waiting, "c", 8) == [False]


def test_what_was_told_stays_true_while_a_request_waits(waiting: DiskWaiting) -> None:
    told(waiting, "a", 1, 2, 3, 4, 5, 6)
    for _ in range(3):
        waiting.end_step([])
        assert told(waiting, "a", 1, 6, 7) == [True, True, False]


def test_one_that_does_not_ask_again_has_its_blocks(waiting: DiskWaiting) -> None:
    told(waiting, "a", 1, 2, 3, 4, 5, 6)
    waiting.end_step([])
    assert told(waiting, "b", 7) == [False]
    waiting.end_step([])
    assert told(waiting, "b", 7, 8) == [True, True]


def test_one_with_a_load_need_not_ask(waiting: DiskWaiting) -> None:
    told(waiting, "a", 1, 2, 3, 4, 5, 6)
    for _ in range(3):
        waiting.end_step(["a"])
        assert told(waiting, "b", 7) == [False]


def test_a_slow_disk_gives_less_at_a_time() -> None:
    waiting = DiskWaiting(rows=10**6, chunk_bytes=10**6, most_seconds=2.0)
    assert waiting.most == 2 * FIRST_RATE / 1e6
    for _ in range(50):
        waiting.learn(100, 10.0)
    assert waiting.most == pytest.approx(20, abs=1)
    for _ in range(50):
        waiting.learn(100, 0.01)
    assert waiting.most == pytest.approx(20_000, abs=1)
    for _ in range(50):
        waiting.learn(1, 1e6)
    assert waiting.most == 1


def test_a_load_that_was_given_up_tells_at_once_and_small_loads_only_of_a_faster_disk() -> None:
    waiting = DiskWaiting(rows=10**6, chunk_bytes=10**6, most_seconds=2.0)
    waiting.learn_slow(0, 5.0)
    assert waiting.most == 1
    waiting.learn(1, 0.01, by_all=False)
    assert waiting.most == 60
    waiting.learn(1, 1.0, by_all=False)
    assert waiting.most == 60
    waiting.learn_slow(10_000, 5.0)
    assert waiting.most == 60
