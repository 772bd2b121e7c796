"""The index of chunks on disk and its jobs, with real files: limits, faults, slow and hanging disks."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dynamo_vllm.engine.tiers import disk_cache, disk_keeper, disk_threads
from dynamo_vllm.engine.tiers.disk_cache import Change, DiskCache, Finished, most_chunks
from dynamo_vllm.engine.tiers.disk_files import FOLDER, Slot, file_bytes
from dynamo_vllm.engine.tiers.disk_keeper import Place
from harness.waiting import until

SIZE, ROWS = 4096, 32
PRINT = "a" * 32
Move = tuple[bytes, int]


def key(number: int) -> bytes:
    return bytes([number]) * 36


def moves(*numbers: int, first: int = 0) -> list[Move]:
    return [(key(number), first + row) for row, number in enumerate(numbers)]


@dataclass
class Tier:
    """A cache with its host memory, and the jobs that have ended."""

    cache: DiskCache
    rows: npt.NDArray[np.uint8]
    ended: dict[int, Finished] = field(default_factory=dict)
    jobs: int = 0

    def poll(self) -> None:
        self.ended |= {done.job_id: done for done in self.cache.finished()}

    def wait_for(self, job: int) -> Finished:
        def has_ended() -> bool:
            self.poll()
            return job in self.ended

        until(f"the end of job {job}", has_ended, every=0.001)
        return self.ended[job]

    def begin_store(self, *numbers: int, first: int = 0) -> int:
        self.jobs += 1
        self.cache.store(self.jobs, moves(*numbers, first=first))
        return self.jobs

    def begin_load(self, *numbers: int, first: int = 0) -> int:
        self.jobs += 1
        self.cache.load(self.jobs, moves(*numbers, first=first))
        return self.jobs

    def store(self, *numbers: int) -> Finished:
        """Stores chunks that contain their number."""
        for row, number in enumerate(numbers):
            self.rows[row] = number
        return self.wait_for(self.begin_store(*numbers))

    def load(self, *numbers: int) -> Finished:
        self.rows[:] = 255
        return self.wait_for(self.begin_load(*numbers))

    def values(self) -> list[int]:
        """Returns what each row contains; it must be the same everywhere in a row."""
        assert (self.rows == self.rows[:, :1]).all()
        return [int(value) for value in self.rows[:, 0]]

    def is_paused(self) -> bool:
        return self.cache.is_paused

    def works(self) -> bool:
        self.poll()
        return self.cache._can_store

    def has(self, *numbers: int) -> list[bool]:
        self.poll()
        return [self.cache.has(key(number)) for number in numbers]


@contextmanager
def tier(root: Path, chunks: int = 16, **place: float) -> Iterator[Tier]:
    rows = np.zeros((ROWS, SIZE), np.uint8)
    where = Place(
        root=root,
        fingerprint=PRINT,
        chunk_bytes=SIZE,
        most_chunks=chunks,
        **{"first_pause": 0.01, "longest_pause": 0.02, **place},
    )
    cache = DiskCache(where, rows, tells_changes=True)
    try:
        yield Tier(cache, rows)
    finally:
        cache.close()


@contextmanager
def working(root: Path, chunks: int = 16, **place: float) -> Iterator[Tier]:
    with tier(root, chunks, **place) as made:
        until("the folder is open", made.works)
        yield made


def files(root: Path) -> list[Path]:
    return sorted(root.glob(f"{FOLDER}/*/*/*/??/*"))


def pauses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "next try in" in text]


@dataclass
class Hold:
    """Stops a call of the system for chunks, until it is released."""

    released: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.reached.set()
        self.released.wait(60)


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Hold]:
    """Holds os.preadv or os.writev of the threads of jobs."""
    hold, real = Hold(), getattr(os, name)

    def call(*args: object) -> int:
        if threading.current_thread().name != "kv-disk-keeper":
            hold()
        return int(real(*args))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        try:
            yield hold
        finally:
            hold.released.set()


@dataclass
class Clock:
    """A time that passes only when a test says so."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """For the limit of a load and of a file; the thread that tries again has the real time."""
    made = Clock()
    for module in (disk_cache, disk_threads):
        monkeypatch.setattr(module, "time", made)
    return made


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> Iterator[list[str]]:
    """Has a call of the system fail, in all threads; yields what names each failed call's thread."""
    calls: list[str] = []

    def call(*args: object) -> int:
        calls.append(threading.current_thread().name)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        yield calls


# --- as it should be --------------------------------------------------------------------------------------


def test_chunks_come_back_into_other_rows(tmp_path: Path) -> None:
    with working(tmp_path) as made:
        assert made.store(1, 2, 3, 4, 5, 6, 7).is_whole
        assert made.has(1, 7, 8) == [True, True, False]
        assert len(made.cache) == 7 and made.cache.used_bytes == 7 * file_bytes(SIZE)
        done = made.load(5, 2, 7)
        assert done.is_whole and set(done.loaded) == {key(5), key(2), key(7)}
        assert made.values() == [5, 2, 7] + [255] * (ROWS - 3)
        done = made.load(1, 9, 2)
        assert not done.is_whole and set(done.loaded) == {key(1), key(2)}
        assert made.values()[:3] == [1, 255, 2]


def test_nothing_is_stored_twice(tmp_path: Path) -> None:
    with working(tmp_path) as made:
        made.store(1, 2)
        before = [path.stat().st_ino for path in files(tmp_path)]
        assert made.store(2, 1).is_whole
        assert [path.stat().st_ino for path in files(tmp_path)] == before


def test_before_the_folder_is_open_nothing_is_found_or_stored(tmp_path: Path) -> None:
    with tier(tmp_path / "a" / "b") as made:
        made.cache._can_load = made.cache._can_store = False
        job = made.begin_store(1)
        other = made.begin_load(1)
        assert not made.cache.has(key(1))
        assert not made.wait_for(job).is_whole and not made.wait_for(other).is_whole


# --- limits -----------------------------------------------------------------------------------------------


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    with working(tmp_path, chunks=4) as made:
        made.store(1, 2, 3, 4)
        made.cache.touch([key(1)])
        made.load(2)
        assert made.store(5, 6).is_whole
        assert made.has(1, 2, 3, 4, 5, 6) == [True, True, False, False, True, True]
        assert len(files(tmp_path)) == 4
        assert made.cache.take_counts().evicted == 2


def test_a_smaller_limit_removes_the_oldest(tmp_path: Path) -> None:
    with working(tmp_path) as made:
        for number in range(1, 7):
            made.store(number)
            os.utime(files(tmp_path)[number - 1], (number, number))
    with working(tmp_path, chunks=2) as made:
        assert made.has(*range(1, 7)) == [False] * 4 + [True] * 2
        assert len(files(tmp_path)) == 2


def test_what_is_being_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with working(tmp_path, chunks=3) as made, held(monkeypatch, "preadv") as reading:
        made.store(1, 2, 3)
        load = made.begin_load(1, 2, first=8)
        assert reading.reached.wait(60)
        done = made.store(4, 5, 6)
        assert not done.is_whole and made.has(1, 2, 3) == [True, True, False]
        assert made.cache.take_counts().dropped == 2
        reading.released.set()
        assert made.wait_for(load).is_whole and made.values()[8:10] == [1, 2]


def test_a_slow_disk_holds_at_most_a_quarter_of_the_host_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working(tmp_path, chunks=100) as made, held(monkeypatch, "writev") as writing:
        jobs = [made.begin_store(*range(first, first + 6), first=first) for first in (1, 7, 13)]
        assert writing.reached.wait(60)
        made.poll()
        assert set(made.ended) == {jobs[2]} and not made.ended[jobs[2]].is_whole
        assert made.cache.take_counts().dropped == 3 * 6 - ROWS // 4
        writing.released.set()
        assert made.wait_for(jobs[0]).is_whole and not made.wait_for(jobs[1]).is_whole
        assert len(made.cache) == ROWS // 4


def test_stores_do_not_delay_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with working(tmp_path) as made:
        made.store(1, 2, 3)
        with held(monkeypatch, "writev") as writing:
            job = made.begin_store(4, 5, 6, 7)
            assert writing.reached.wait(60)
            assert made.wait_for(made.begin_load(1, 2, 3, first=16)).is_whole
            assert job not in made.ended


def test_a_limit_for_less_than_one_chunk_is_refused() -> None:
    assert most_chunks(10 * file_bytes(SIZE), SIZE) == 7
    with pytest.raises(ValueError, match=r"--kv-offload-disk .* give at least .* GB"):
        most_chunks(3 * file_bytes(SIZE), SIZE)


def test_files_never_take_more_than_the_limit(tmp_path: Path) -> None:
    limit = 8 * file_bytes(SIZE)
    with working(tmp_path, chunks=most_chunks(limit, SIZE)) as made:
        for number in range(1, 40, 3):
            made.store(number, number + 1, number + 2)
            assert sum(path.stat().st_blocks * 512 for path in files(tmp_path)) <= limit


def test_a_request_with_a_load_still_counts_as_waiting(tmp_path: Path) -> None:
    with working(tmp_path, chunks=100) as made:
        for first in range(1, 41, 8):
            made.store(*range(first, first + 8))
        cache, most = made.cache, ROWS * 2 // 3
        offered = [cache.offers(key(number), "a") for number in range(1, 41)]
        assert offered == [True] * most + [False] * (40 - most)
        cache.load(99, moves(*range(1, 16)), "a")
        cache.end_step()
        assert cache.offers(key(1), "a") and not cache.offers(key(40), "b")
        made.wait_for(99)
        cache.end_step()
        cache.end_step()
        assert cache.offers(key(40), "b") and not cache.offers(key(50), "b")


# --- damaged files ----------------------------------------------------------------------------------------


def test_a_damaged_or_removed_file_is_a_miss_and_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with working(tmp_path) as made:
        made.store(1, 2, 3)
        for path in files(tmp_path)[:2]:
            data = bytearray(path.read_bytes())
            data[-5] ^= 4
            path.write_bytes(data)
        done = made.load(1, 2, 3)
        assert not done.is_whole and done.loaded == [key(3)]
        assert made.values()[:3] == [255, 255, 3]
        assert made.has(1, 2, 3) == [False, False, True] and len(files(tmp_path)) == 1
        assert made.cache.take_counts().failures == {"damaged": 2}
        assert not made.is_paused() and made.store(1, 2).is_whole
        files(tmp_path)[0].unlink()
        assert made.load(1, 2).loaded == [key(2)]
        assert made.has(1) == [False] and not made.is_paused()
    assert [text for text in caplog.messages if "useless" in text and "checksum" in text] == caplog.messages


# --- a disk that fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "is_of_the_file"), [(errno.EIO, True), (errno.ESTALE, False)])
def test_a_read_error_pauses_the_tier_with_one_line_and_removes_a_file_that_has_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    is_of_the_file: bool,
) -> None:
    caplog.set_level(logging.INFO)
    with working(tmp_path) as made:
        made.store(1, 2, 3, 4, 5, 6, 7, 8)
        caplog.clear()
        with failing(monkeypatch, "preadv", code), failing(monkeypatch, "writev", code):
            assert not made.load(1, 2, 3, 4, 5).is_whole
            assert made.is_paused() and made.has(6, 7, 8) == [False] * 3
            assert not made.store(9).is_whole and not made.load(6).is_whole
            assert (made.cache.take_counts().failures, len(pauses(caplog))) == ({"error": 1}, 1)
        until("it works again", made.works)
        assert made.has(6, 7, 8) == [True] * 3 and made.load(6, 8).is_whole
        assert (len(files(tmp_path)) < 8) is is_of_the_file
    assert len(caplog.messages) == 2 and os.strerror(code) in caplog.messages[0]
    assert str(tmp_path) in caplog.messages[0] and "works again" in caplog.messages[1]


def test_a_full_disk_stops_stores_and_not_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with working(tmp_path) as made:
        made.store(1, 2)
        caplog.clear()
        with failing(monkeypatch, "writev", errno.ENOSPC) as calls:
            assert not made.store(3, 4).is_whole
            assert made.is_paused() and made.load(1, 2).is_whole
            until("some tries", lambda: calls.count("kv-disk-keeper") > 3)
            assert not made.store(5).is_whole and made.has(1, 2, 3) == [True, True, False]
            assert made.cache.take_counts().failures == {"full": 1}
            assert len(files(tmp_path)) == 2 and not list(tmp_path.glob(f"{FOLDER}/*/*/parts/*"))
        until("it works again", made.works)
        assert not made.is_paused() and made.store(3, 4).is_whole and made.has(1, 3) == [True, True]
    assert len(caplog.messages) == 2
    assert "the disk is full" in caplog.messages[0] and "fewer GB" in caplog.messages[0]
    assert "works again" in caplog.messages[1]


def test_victims_of_stores_that_a_full_disk_ended_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files are still there, and would take room beyond the limit."""
    with working(tmp_path, chunks=8) as made:
        made.store(1, 2, 3, 4, 5, 6, 7, 8)
        with held(monkeypatch, "unlink") as removing, failing(monkeypatch, "writev", errno.ENOSPC):
            waiting = [made.begin_store(number) for number in range(11, 15)]
            assert removing.reached.wait(60)
            removing.released.set()
            assert not any(made.wait_for(job).is_whole for job in waiting)
        until("it works again", made.works)
        assert len(made.cache) == len(files(tmp_path)) <= 8
        made.store(21, 22, 23, 24)
        assert len(made.cache) == len(files(tmp_path)) <= 8


def test_a_disk_that_is_full_at_the_start_still_gives_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with working(tmp_path) as made:
        made.store(1, 2)
    with failing(monkeypatch, "writev", errno.EDQUOT), tier(tmp_path) as made:
        until("it is open", lambda: made.has(1) == [True])
        assert made.is_paused() and made.load(1, 2).is_whole and not made.store(3).is_whole
    assert len(pauses(caplog)) == 1


def test_a_folder_that_cannot_be_used_does_not_keep_the_engine_from_working(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place = tmp_path / "place"
    place.touch()
    with tier(place) as made:
        until("it has told", lambda: bool(caplog.messages))
        assert made.has(1) == [False] and not made.store(1).is_whole and made.is_paused()
        assert made.cache.take_counts().failures == {"error": 1}
        place.unlink()
        until("it works", made.works)
        assert made.store(1).is_whole and made.load(1).is_whole
    assert len(caplog.messages) == 2 and "Not a directory" in caplog.messages[0]


@pytest.mark.parametrize("found_by", ["load", "store"])
def test_a_folder_that_vanishes_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, found_by: str
) -> None:
    caplog.set_level(logging.INFO)
    with working(tmp_path) as made:
        made.store(1, 2)
        shutil.rmtree(tmp_path / FOLDER)
        assert not (made.load(1) if found_by == "load" else made.store(3)).is_whole
        until("it works again", made.works)
        assert made.has(1, 2) == [False, False]
        assert made.store(1, 2).is_whole and made.load(1, 2).is_whole and len(files(tmp_path)) == 2
    assert len(pauses(caplog)) == 1


def test_pauses_grow_while_it_fails_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with working(tmp_path, first_pause=1.0, longest_pause=4.0) as made:
        cache = made.cache
        monkeypatch.setattr(cache._keeper, "settle", lambda order: None)
        said = []
        for _ in range(4):
            cache._can_load = cache._can_store = True
            cache._works_since = float("inf")
            cache._fail("error", "?")
            said.append(cache._pause)
        cache._can_load, cache._works_since = True, float("-inf")
        cache._fail("error", "?")
        assert [*said, cache._pause] == [1.0, 2.0, 4.0, 4.0, 1.0]


# --- a slow disk ------------------------------------------------------------------------------------------


def test_a_slow_disk_gets_loads_that_it_can_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Five chunks in 31 s are two in the half of 30 s that a prompt may wait."""
    preadv, reads = os.preadv, threading.Semaphore(5)

    def read(*args: Any) -> int:
        reads.acquire()
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", read)
    with working(tmp_path, chunks=40, slow_seconds=30.0) as made:
        for first in (1, 9, 17):
            made.store(*range(first, first + 8))
        wanted = [number for number in range(1, 25) if made.cache.offers(key(number), "long")]
        assert len(wanted) == ROWS * 2 // 3
        made.cache.load(99, moves(*wanted), "long")
        until("the disk has read some", lambda: loaded_by(made, 99) == 5)
        assert not made.cache.finished()
        clock.now += 31
        assert len(made.wait_for(99).loaded) == 5
        reads.release(1000)
        until("it works again", made.works)
        for _ in range(2):
            made.cache.end_step()  # the long one computes
        fitting = [number for number in range(1, 25) if made.cache.offers(key(number), "next")]
        assert len(fitting) == 2 and made.load(*fitting).is_whole and not made.is_paused()
        until(
            "more is loaded at a time",
            lambda: made.load(*range(1, 9)).is_whole and made.cache._waiting.most > 2,
        )


def loaded_by(made: Tier, job: int) -> int:
    return sum(len(part.moved) for part in made.cache._jobs[job].parts)


# --- a disk that hangs ------------------------------------------------------------------------------------


def test_a_hanging_read_is_given_up_and_never_reaches_the_host_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    caplog.set_level(logging.INFO)
    with working(tmp_path, slow_seconds=30.0) as made:
        made.store(1, 2, 3)
        caplog.clear()
        tries: list[float] = []
        busy = made.cache._threads.busy_seconds

        def tried() -> float:
            tries.append(busy())
            return tries[-1]

        monkeypatch.setattr(made.cache._keeper, "_busy_seconds", tried)
        with held(monkeypatch, "preadv") as reading:
            job = made.begin_load(1, 2, 3)
            assert reading.reached.wait(60)
            clock.now += 31
            done = made.wait_for(job)
            assert not done.is_whole and not done.loaded
            assert made.is_paused() and made.has(1) == [False]
            assert made.cache.take_counts().failures == {"slow": 1}
            made.rows[:] = 77  # the host tier has given the rows to somebody else
            until("some tries while the thread hangs", lambda: len(tries) > 6)
            assert not made.works() and made.is_paused()
            reading.released.set()
            until("it works again", made.works)
        assert made.values() == [77] * ROWS
        assert made.has(1, 2, 3) == [True] * 3 and made.load(3).is_whole
    assert len(caplog.messages) == 2 and "took more than 30 s" in caplog.messages[0]
    assert len(pauses(caplog)) == 1


def test_a_hanging_write_lets_the_host_tier_have_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    with working(tmp_path, slow_seconds=30.0) as made:
        with held(monkeypatch, "writev") as writing:
            job = made.begin_store(1, 2, 3, 4)
            assert writing.reached.wait(60)
            clock.now += 31
            done = made.wait_for(job)
            assert not done.is_whole and made.is_paused()
            made.rows[:] = 77
            writing.released.set()
            until("it works again", made.works)
        assert made.has(1, 2, 3, 4) == [False] * 4 and files(tmp_path) == []
        assert made.store(1).is_whole and made.load(1).is_whole and made.values()[0] == 1


def test_closing_does_not_wait_for_a_hanging_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_CLOSING_SECONDS", 0.2)
    with held(monkeypatch, "preadv") as reading:
        with working(tmp_path) as made:
            made.store(1)
            made.begin_load(1, first=3)
            assert reading.reached.wait(60)
        assert not reading.released.is_set()
        Slot.take(tmp_path, PRINT, SIZE).close()
        assert [path.name for path in tmp_path.glob(f"{FOLDER}/*/*")] == ["0"]


# --- resets -----------------------------------------------------------------------------------------------


def test_a_reset_forgets_and_removes_all(tmp_path: Path) -> None:
    with working(tmp_path) as made:
        made.store(1, 2, 3)
        made.cache.reset()
        assert made.has(1, 2, 3) == [False] * 3 and len(made.cache) == 0
        until("it works again", made.works)
        assert files(tmp_path) == []
        assert made.store(4).is_whole and made.load(4).is_whole and made.values()[0] == 4
    with working(tmp_path) as made:
        assert made.has(1, 4) == [False, False] and files(tmp_path) == []


def test_a_reset_ends_jobs_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with working(tmp_path) as made:
        made.store(1, 2)
        with held(monkeypatch, "preadv") as reading, held(monkeypatch, "writev") as writing:
            load, store = made.begin_load(1, 2), made.begin_store(3, 4, first=4)
            assert reading.reached.wait(60) and writing.reached.wait(60)
            made.cache.reset()
            made.poll()  # at once: vLLM asks once after a reset
            assert not made.ended[load].is_whole and not made.ended[store].is_whole
            made.rows[:] = 77
        until("it works again", made.works)
        made.store(5)
        made.rows[:] = 77
        assert made.load(5).is_whole and made.values()[1:] == [255] * (ROWS - 1)
        assert made.has(1, 2, 3, 4) == [False] * 4
        assert [path.name for path in files(tmp_path)] == [f"{key(5).hex()}.kv"]


def test_a_reset_before_the_folder_is_open_and_while_it_is_paused_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working(tmp_path) as made:
        made.store(1)
    with tier(tmp_path) as made:
        made.cache.reset()
        until("it works", made.works)
        assert made.has(1) == [False] and files(tmp_path) == []
        made.store(1, 2)
        with failing(monkeypatch, "preadv", errno.EIO):
            made.load(1)
            made.cache.reset()
        until("it works again", made.works)
        assert made.has(1, 2) == [False] * 2 and files(tmp_path) == []
        assert not made.is_paused()


# --- what the router is told ------------------------------------------------------------------------------


def test_changes_are_told_once(tmp_path: Path) -> None:
    with working(tmp_path, chunks=2) as made:
        made.store(1, 2)
        made.store(1)
        (stored,) = {change.is_removed for change in made.cache.changes()}
        assert stored is False
        made.store(3)
        assert made.cache.changes() == [Change([key(2)], True), Change([key(3)], False)]
        made.cache.reset()
        (removed,) = made.cache.changes()
        assert removed.is_removed and set(removed.keys) == {key(1), key(3)}


def test_chunks_of_an_earlier_process_are_told_when_they_are_loaded(tmp_path: Path) -> None:
    with working(tmp_path) as made:
        made.store(1, 2, 3)
    with working(tmp_path, chunks=3) as made:
        assert made.cache.changes() == [] and made.has(1, 2, 3, 4) == [True, True, True, False]
        for _ in range(2):
            assert made.load(2).is_whole and made.values()[:2] == [2, 255]
        assert made.cache.changes() == [Change([key(2)], False)]
        made.store(4, 5)
        told = made.cache.changes()
        assert not any(change.is_removed for change in told)


def other_slot(root: Path, fingerprint: str = "b" * 32) -> Slot:
    """Returns the slot of another engine, with a file."""
    slot = Slot.take(root, fingerprint, SIZE)
    slot.tidy(0).write(key(1), memoryview(bytes(SIZE)), lambda: True)
    return slot


def test_files_of_engines_that_start_again_later_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart of all workers one is the first, whatever their models are."""
    monkeypatch.setattr(disk_keeper, "STRAY_SECONDS", math.inf)
    late, other = other_slot(tmp_path), other_slot(tmp_path, PRINT)
    late.close()
    with working(tmp_path) as made:
        other.close()
        assert late.path.exists()
        made.cache._keeper._remove_strays()  # its thread waits; this is the first time that `other` is lost
        assert other.path.exists() and not late.path.exists()
        again = other_slot(tmp_path, PRINT)
        assert again.path == other.path
        again.close()
        made.cache._keeper._remove_strays()
        assert again.path.exists(), "it was taken since the last look"
        again = other_slot(tmp_path, PRINT)
        made.cache._keeper._remove_strays()
        assert again.path.exists()
        again.close()


@pytest.mark.parametrize("fails", ["take", "prove"])
def test_room_of_lost_engines_is_used_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """They may fill the disk: after an update they are of another version."""
    monkeypatch.setattr(disk_keeper, "STRAY_SECONDS", 0.05)
    lost = other_slot(tmp_path)
    lost.close()
    real = getattr(Slot, fails)

    def full(*given: Any) -> Any:
        if lost.path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given)

    monkeypatch.setattr(Slot, fails, full)
    with tier(tmp_path, first_pause=600.0, longest_pause=600.0) as made:
        until("it works", made.works)


def test_files_of_engines_that_do_not_come_back_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_keeper, "STRAY_SECONDS", 0.02)
    with working(tmp_path) as made:
        made.store(1)
        lost = [other_slot(tmp_path, fingerprint) for fingerprint in (PRINT, "b" * 32)]
        for slot in lost:
            slot.close()
        until("their files are gone", lambda: not any(slot.path.exists() for slot in lost))
        assert made.load(1).is_whole


def begin_some(made: Tier, chance: random.Random, extra: int) -> dict[int, list[Move]]:
    """Begins one to four jobs at random rows; returns the loads."""
    loads = {}
    made.rows[:] = 255
    for first in range(0, 8 * chance.randrange(1, 5), 8):
        numbers = chance.sample(range(1, 21), chance.randrange(1, 7))
        if chance.random() < 0.5:
            loads[made.begin_load(*numbers, first=first)] = moves(*numbers, first=first)
            continue
        made.rows[first : first + len(numbers)] = np.array([[number + extra] for number in numbers])
        made.begin_store(*numbers, first=first)
    return loads


def damage_one(root: Path, chance: random.Random) -> None:
    if there := files(root):
        path = chance.choice(there)
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        chance.choice(there).write_bytes(data)


def test_whatever_happens_no_wrong_chunk_is_ever_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores, loads, resets, damage and errors at random; a chunk has other content after each reset."""
    chance, fails = random.Random(7), threading.Event()
    for name, code in (("writev", errno.ENOSPC), ("preadv", errno.EIO)):
        real = getattr(os, name)

        def call(*args: object, real: Callable[..., int] = real, code: int = code) -> int:
            if fails.is_set():
                raise OSError(code, os.strerror(code))
            return real(*args)

        monkeypatch.setattr(os, name, call)
    resets = loaded = 0
    with working(tmp_path, chunks=12, slow_seconds=30.0) as made:
        for _ in range(400):
            extra = 21 * (resets % 10)
            loads = begin_some(made, chance, extra)
            if chance.random() < 0.05:
                made.cache.reset()
                resets += 1
            for job in range(made.jobs - 3, made.jobs + 1):
                loaded += len(made.wait_for(job).loaded) if job > 0 else 0
            for job, these in loads.items():
                for chunk, row in these:
                    expected = chunk[0] + extra if chunk in made.ended[job].loaded else 255
                    assert (made.rows[row] == expected).all()
            if chance.random() < 0.05:
                fails.clear() if fails.is_set() else fails.set()
            if not fails.is_set():
                until("it works again", made.works)
                if chance.random() < 0.1:
                    damage_one(tmp_path, chance)
        fails.clear()
        until("it works again", made.works)
        assert set(made.cache._index.values()) <= {0} and not made.cache._jobs and not made.cache._writing
        assert len(made.cache) == len(files(tmp_path)) <= 12 and loaded > 100 and resets > 5
