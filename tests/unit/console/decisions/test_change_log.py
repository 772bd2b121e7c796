"""What blocks had before they changed."""

from __future__ import annotations

import random

from dynamo_vllm.console.decisions import change_log
from dynamo_vllm.console.decisions.change_log import ChangeLog

BLOCKS = range(1, 6)


def test_states_are_those_that_were() -> None:
    rng = random.Random(3)
    log, now = ChangeLog(most=80), dict.fromkeys(BLOCKS, 0)
    past: list[tuple[float, list[int]]] = []
    for number in range(200):
        here = rng.choice(BLOCKS)
        log.add(here, now[here], float(number))
        now[here] ^= 1 << rng.randrange(6)
        past.append((float(number), list(now.values())))
    kept = [(at, state) for at, state in past if at >= log.begins]
    assert 70 <= len(kept) - 1 <= 80
    assert all(list(log.states(BLOCKS, at, now)) == state for at, state in kept)


def test_changes_at_one_time_are_undone_together() -> None:
    log = ChangeLog()
    for before in (0, 1, 3):
        log.add(7, before, 5.0)
    assert list(log.states([7, 8], 4.9, {7: 7, 8: 2})) == [0, 2]
    assert list(log.states([7, 8], 5.0, {7: 7, 8: 2})) == [7, 2]


def test_times_of_changes_are_found_in_all_parts() -> None:
    log = ChangeLog(most=16)
    for number in range(100):
        log.add(number % 4, 0, float(number))
    assert log.times([1], 90.0, 98.0) == [93.0, 97.0]
    assert log.times([1, 2], 93.0, 94.0) == [93.0, 94.0]
    assert log.times([9], 0.0, 100.0) == []


def test_old_changes_go() -> None:
    log = ChangeLog()
    log.add(1, 0, 10.0)
    log.add(1, 1, 11.0 + change_log.KEEP_SECONDS)
    assert log.begins == 10.0
    assert list(log.states([1], 9.0, {1: 3})) == [1]


def test_changes_are_kept_for_the_whole_time() -> None:
    log = ChangeLog()
    for at in range(3 * int(change_log.KEEP_SECONDS)):
        log.add(1, at, float(at))
        assert at - log.begins >= change_log.KEEP_SECONDS


def test_message_that_is_late_does_not_hide_the_changes_before_it() -> None:
    log = ChangeLog(most=8)
    log.add(1, 0, 20.0)
    log.add(2, 0, 19.0)
    log.add(3, 0, 21.0)
    assert list(log.states([1, 2], 19.5, {1: 1, 2: 1})) == [0, 1]
