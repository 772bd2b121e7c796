"""Chunks as files: written whole or not at all, checked when they are read, one owner for each folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dynamo_vllm.engine.tiers import disk_files
from dynamo_vllm.engine.tiers.disk_files import FOLDER, Chunks, Damaged, Slot

ONE, OTHER = "1" * 32, "2" * 32
SIZE = 8192
KEY, KEY2 = b"k" * 36, b"\x01" * 36


def payload(seed: int) -> bytes:
    return bytes((seed + n) % 251 for n in range(SIZE))


def write(chunks: Chunks, key: bytes, data: bytes) -> bool:
    return chunks.write(key, memoryview(data), lambda: True)


def read(chunks: Chunks, key: bytes) -> bytes:
    buffer = bytearray(SIZE)
    chunks.read(key, memoryview(buffer))
    return bytes(buffer)


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    return Slot.take(tmp_path, ONE, SIZE)


@pytest.fixture
def chunks(slot: Slot) -> Chunks:
    return slot.tidy(0)


def test_a_chunk_comes_back_as_it_was_last_written_for_this_user_alone(
    chunks: Chunks, tmp_path: Path
) -> None:
    assert write(chunks, KEY, payload(0)) and write(chunks, KEY2, payload(2))
    assert write(chunks, KEY, payload(1)) and len(chunks.scan()) == 2
    assert (read(chunks, KEY), read(chunks, KEY2)) == (payload(1), payload(2))
    for path in (chunks.path(KEY), tmp_path / FOLDER):
        assert os.stat(path).st_mode & 0o77 == 0


def test_any_damage_is_noticed(chunks: Chunks) -> None:
    write(chunks, KEY, payload(1))
    path = Path(chunks.path(KEY))
    whole = path.read_bytes()
    places = [*range(len(whole) - SIZE + 1), len(whole) // 2, len(whole) - 1]
    flipped = [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in places]
    for data in (b"", whole[:-1], whole + b"\0", *flipped):
        path.write_bytes(data)
        with pytest.raises(Damaged):
            read(chunks, KEY)


def test_the_file_of_another_key_or_model_is_refused(chunks: Chunks, tmp_path: Path) -> None:
    theirs = Slot.take(tmp_path, OTHER, SIZE).tidy(0)
    write(chunks, KEY, payload(1))
    for other, key in ((chunks, KEY2), (theirs, KEY)):
        write(other, key, payload(2))
        shutil.copy(other.path(key), chunks.path(KEY))
        with pytest.raises(Damaged, match="another chunk"):
            read(chunks, KEY)


def test_a_link_is_not_followed(chunks: Chunks, tmp_path: Path) -> None:
    write(chunks, KEY, payload(1))
    os.rename(chunks.path(KEY), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", chunks.path(KEY))
    with pytest.raises(OSError):
        read(chunks, KEY)


def test_a_late_write_into_a_removed_generation_fails(slot: Slot, chunks: Chunks) -> None:
    """What was computed with weights of before must not appear among chunks of now."""
    later: list[Chunks] = []

    def reset_meanwhile() -> bool:
        later.append(slot.tidy(1))
        return True

    with pytest.raises(FileNotFoundError):
        chunks.write(KEY, memoryview(payload(1)), reset_meanwhile)
    assert later[0].scan() == [] and slot.tidy(0).scan() == []


def test_a_write_that_fails_or_is_not_wanted_any_more_leaves_nothing(
    slot: Slot, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, parts: object) -> int:
        raise OSError(28, "No space left on device")

    assert not chunks.write(KEY, memoryview(payload(1)), lambda: False)
    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        write(chunks, KEY, payload(1))
    assert chunks.scan() == [] and os.listdir(slot.path / "parts") == []


def test_short_writes_and_reads_go_on(chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [parts[0][:1000]]))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: preadv(fd, [parts[0][:700]], offset))
    assert write(chunks, KEY, payload(3))
    assert read(chunks, KEY) == payload(3)


def test_scan_finds_all_in_the_order_of_their_use(chunks: Chunks) -> None:
    keys = [bytes([n]) * 36 for n in range(5)]
    for age, key in enumerate(keys):
        write(chunks, key, payload(age))
        os.utime(chunks.path(key), (1000 + age, 1000 + age))
    chunks.touch([keys[1], b"not there"])
    assert chunks.scan() == [keys[0], *keys[2:], keys[1]]


def test_scan_removes_what_is_no_chunk(chunks: Chunks) -> None:
    write(chunks, KEY, payload(1))
    write(chunks, KEY2, payload(2))
    os.truncate(chunks.path(KEY2), SIZE)
    strange = Path(chunks.path(KEY)).with_name("notes.txt")
    strange.write_text("?")
    assert chunks.scan() == [KEY]
    assert not strange.exists() and not os.path.exists(chunks.path(KEY2))


# --- slots ------------------------------------------------------------------------------------------------


def test_owners_never_share_a_slot_and_a_successor_finds_the_files(tmp_path: Path) -> None:
    slots = [Slot.take(tmp_path, ONE, SIZE) for _ in range(3)]
    assert len({slot.path for slot in slots}) == 3
    write(slots[1].tidy(0), KEY, payload(1))
    slots[1].close()
    again = Slot.take(tmp_path, ONE, SIZE)
    assert again.path == slots[1].path and read(again.tidy(0), KEY) == payload(1)


def test_an_unowned_slot_with_files_is_taken_before_a_new_one(tmp_path: Path) -> None:
    first, second = (Slot.take(tmp_path, ONE, SIZE) for _ in range(2))
    shutil.rmtree(first.path)
    second.close()
    assert Slot.take(tmp_path, ONE, SIZE).path == second.path


def test_what_was_stored_after_a_reset_is_not_for_a_successor(tmp_path: Path) -> None:
    slot = Slot.take(tmp_path, ONE, SIZE)
    write(slot.tidy(0), KEY, payload(1))
    write(slot.tidy(1), KEY2, payload(2))
    slot.close()
    assert Slot.take(tmp_path, ONE, SIZE).tidy(0).scan() == []
    assert sorted(os.listdir(slot.path)) == ["chunks", "lock", "parts"]


def test_slots_without_an_owner_are_found_and_removed(tmp_path: Path) -> None:
    mine = Slot.take(tmp_path, ONE, SIZE)
    living, dead = (Slot.take(tmp_path, OTHER, SIZE) for _ in range(2))
    write(living.tidy(0), KEY, payload(1))
    write(dead.tidy(0), KEY, payload(1))
    dead.close()
    (tmp_path / FOLDER / "notes").mkdir()
    (tmp_path / "mine.txt").write_text("kept")
    assert {path for path, _ in disk_files.unowned(tmp_path)} == {dead.path}
    assert not disk_files.remove_unowned(living.path) and disk_files.remove_unowned(dead.path)
    assert living.path.exists() and mine.path.exists() and not dead.path.exists()
    assert (tmp_path / FOLDER / "notes").exists() and (tmp_path / "mine.txt").exists()
    living.close()
    assert disk_files.remove_unowned(living.path)
    assert not (tmp_path / FOLDER / OTHER).exists() and mine.is_ours()


def test_a_look_at_slots_takes_none_from_who_starts(tmp_path: Path) -> None:
    Slot.take(tmp_path, ONE, SIZE).close()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            disk_files.unowned(tmp_path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(300):
            slot = Slot.take(tmp_path, ONE, SIZE)
            assert slot.path.name == "0"
            slot.close()
    finally:
        is_over.set()
        looking.join()


def test_a_replaced_folder_is_noticed(slot: Slot) -> None:
    assert slot.is_ours()
    shutil.rmtree(slot.path)
    assert not slot.is_ours()
    slot.path.mkdir()
    (slot.path / "lock").touch()
    assert not slot.is_ours()


def test_a_file_in_place_of_the_folder_and_the_folder_of_another_user_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        Slot.take(tmp_path / "file", ONE, SIZE)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER).chmod(0o777)
    with pytest.raises(PermissionError, match="another user"):
        Slot.take(tmp_path, ONE, SIZE)


WRITING = """
import sys
from pathlib import Path
from dynamo_vllm.engine.tiers.disk_files import Slot
chunks = Slot.take(Path(sys.argv[1]), "1" * 32, 8192).tidy(0)
data = bytes(n % 251 for n in range(8192 + 251))
number = 0
while True:
    first = number % 251
    chunks.write(number.to_bytes(36, "big"), memoryview(data)[first : first + 8192], lambda: True)
    number += 1
    if number == 20:
        print("busy", flush=True)
"""


def test_processes_that_are_killed_while_they_write_leave_whole_chunks_each_in_its_slot(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", WRITING, str(tmp_path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "busy\n"
        assert disk_files.unowned(tmp_path) == set()
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert len(disk_files.unowned(tmp_path)) == 2
    for _ in writers:
        slot = Slot.take(tmp_path, ONE, SIZE)
        chunks = slot.tidy(0)
        keys = chunks.scan()
        assert len(keys) >= 20 and os.listdir(slot.path / "parts") == []
        for key in keys:
            assert read(chunks, key) == payload(int.from_bytes(key, "big"))


def test_proof_takes_time_and_leaves_nothing(slot: Slot) -> None:
    slot.tidy(0)
    begun = time.monotonic()
    assert 0 < slot.prove() <= time.monotonic() - begun
    assert os.listdir(slot.path / "parts") == []


def test_room_of_a_chunk_covers_its_file(chunks: Chunks) -> None:
    write(chunks, KEY, payload(1))
    found = os.stat(chunks.path(KEY))
    assert found.st_size <= disk_files.file_bytes(SIZE) < found.st_size + 4096
    assert found.st_blocks * 512 <= disk_files.file_bytes(SIZE)
