"""Chunks as files: written whole or not at all, checked when they are read, one owner for each folder."""

from __future__ import annotations

import os
import shutil
import signal
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


def test_a_chunk_comes_back_as_it_was(chunks: Chunks) -> None:
    assert write(chunks, KEY, payload(1)) and write(chunks, KEY2, payload(2))
    assert (read(chunks, KEY), read(chunks, KEY2)) == (payload(1), payload(2))


def test_only_this_user_may_read_it(chunks: Chunks, tmp_path: Path) -> None:
    write(chunks, KEY, payload(1))
    assert os.stat(chunks.path(KEY)).st_mode & 0o77 == 0
    assert os.stat(tmp_path / FOLDER).st_mode & 0o77 == 0


def test_the_later_of_two_chunks_with_one_key_stays(chunks: Chunks) -> None:
    write(chunks, KEY, payload(1))
    write(chunks, KEY, payload(2))
    assert read(chunks, KEY) == payload(2) and chunks.scan() == [KEY]


def changed(path: str, change: str) -> None:
    data = bytearray(Path(path).read_bytes())
    if change == "shorter":
        del data[-1]
    elif change == "empty":
        data.clear()
    elif change == "longer":
        data.append(0)
    elif change == "bit of the chunk":
        data[-1] ^= 1
    elif change == "bit of the key":
        data[-SIZE - 1] ^= 1
    elif change == "magic":
        data[0] ^= 1
    elif change == "format":
        data[8] ^= 1
    Path(path).write_bytes(data)


@pytest.mark.parametrize(
    "change", ["shorter", "empty", "longer", "bit of the chunk", "bit of the key", "magic", "format"]
)
def test_a_damaged_file_is_refused(chunks: Chunks, change: str) -> None:
    write(chunks, KEY, payload(1))
    changed(chunks.path(KEY), change)
    with pytest.raises(Damaged):
        read(chunks, KEY)


def test_any_changed_bit_is_noticed(chunks: Chunks) -> None:
    write(chunks, KEY, payload(1))
    path = Path(chunks.path(KEY))
    whole = path.read_bytes()
    for place in [*range(len(whole) - SIZE), len(whole) - SIZE, len(whole) // 2, len(whole) - 1]:
        data = bytearray(whole)
        data[place] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(Damaged):
            read(chunks, KEY)


def test_the_file_of_another_key_is_refused(chunks: Chunks) -> None:
    write(chunks, KEY, payload(1))
    write(chunks, KEY2, payload(2))
    shutil.copy(chunks.path(KEY2), chunks.path(KEY))
    with pytest.raises(Damaged, match="another chunk"):
        read(chunks, KEY)


def test_the_file_of_another_model_is_refused(chunks: Chunks, tmp_path: Path) -> None:
    theirs = Slot.take(tmp_path, OTHER, SIZE).tidy(0)
    write(theirs, KEY, payload(2))
    write(chunks, KEY, payload(1))
    shutil.copy(theirs.path(KEY), chunks.path(KEY))
    with pytest.raises(Damaged, match="another chunk"):
        read(chunks, KEY)


def test_a_link_is_not_followed(chunks: Chunks, tmp_path: Path) -> None:
    write(chunks, KEY, payload(1))
    os.rename(chunks.path(KEY), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", chunks.path(KEY))
    with pytest.raises(OSError):
        read(chunks, KEY)


def test_a_chunk_that_is_not_wanted_any_more_leaves_nothing(slot: Slot, chunks: Chunks) -> None:
    assert not chunks.write(KEY, memoryview(payload(1)), lambda: False)
    assert chunks.scan() == [] and os.listdir(slot.path / "parts") == []


def test_a_late_write_into_a_removed_generation_fails(slot: Slot, chunks: Chunks) -> None:
    """What was computed with weights of before must not appear among chunks of now."""
    later: list[Chunks] = []

    def reset_meanwhile() -> bool:
        later.append(slot.tidy(1))
        return True

    with pytest.raises(FileNotFoundError):
        chunks.write(KEY, memoryview(payload(1)), reset_meanwhile)
    assert later[0].scan() == [] and slot.tidy(0).scan() == []


def test_a_failed_write_leaves_nothing(slot: Slot, chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, parts: object) -> int:
        raise OSError(28, "No space left on device")

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
    changed(chunks.path(KEY2), "shorter")
    strange = Path(chunks.path(KEY)).with_name("notes.txt")
    strange.write_text("?")
    assert chunks.scan() == [KEY]
    assert not strange.exists() and not os.path.exists(chunks.path(KEY2))


# --- slots ------------------------------------------------------------------------------------------------


def test_a_successor_finds_the_files(tmp_path: Path) -> None:
    slot = Slot.take(tmp_path, ONE, SIZE)
    write(slot.tidy(0), KEY, payload(1))
    slot.close()
    again = Slot.take(tmp_path, ONE, SIZE)
    assert again.path == slot.path
    assert read(again.tidy(0), KEY) == payload(1)


def test_two_owners_never_share_a_slot(tmp_path: Path) -> None:
    slots = [Slot.take(tmp_path, ONE, SIZE) for _ in range(3)]
    assert len({slot.path for slot in slots}) == 3
    slots[1].close()
    assert Slot.take(tmp_path, ONE, SIZE).path == slots[1].path


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


def unowned(root: Path) -> set[Path]:
    return {path for path, _ in disk_files.unowned(root)}


def test_slots_without_an_owner_are_found_and_removed(tmp_path: Path) -> None:
    mine = Slot.take(tmp_path, ONE, SIZE)
    living, dead = (Slot.take(tmp_path, OTHER, SIZE) for _ in range(2))
    write(living.tidy(0), KEY, payload(1))
    write(dead.tidy(0), KEY, payload(1))
    dead.close()
    (tmp_path / FOLDER / "notes").mkdir()
    (tmp_path / "mine.txt").write_text("kept")
    assert unowned(tmp_path) == {dead.path}
    assert not disk_files.remove_unowned(living.path) and disk_files.remove_unowned(dead.path)
    assert living.path.exists() and mine.path.exists() and not dead.path.exists()
    assert (tmp_path / FOLDER / "notes").exists() and (tmp_path / "mine.txt").exists()
    living.close()
    assert unowned(tmp_path) == {living.path} and disk_files.remove_unowned(living.path)
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
        for _ in range(1000):
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


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER).chmod(0o777)
    with pytest.raises(PermissionError, match="another user"):
        Slot.take(tmp_path, ONE, SIZE)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        Slot.take(tmp_path / "file", ONE, SIZE)


WRITING = """
import sys
from pathlib import Path
from dynamo_vllm.engine.tiers.disk_files import Slot
slot = Slot.take(Path(sys.argv[1]), "1" * 32, 8192)
chunks = slot.tidy(0)
print(slot.path, flush=True)
number = 0
while True:
    data = bytes((number + n) % 251 for n in range(8192))
    chunks.write(number.to_bytes(36, "big"), memoryview(data), lambda: True)
    number += 1
    if number == 20:
        print("busy", flush=True)
"""


def writer(folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_kill_in_the_middle_of_writing_leaves_whole_chunks(tmp_path: Path) -> None:
    for _ in range(3):
        process, _path = writer(tmp_path)
        assert process.stdout is not None and process.stdout.readline() == "busy\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        slot = Slot.take(tmp_path, ONE, SIZE)
        chunks = slot.tidy(0)
        keys = chunks.scan()
        assert len(keys) >= 20 and os.listdir(slot.path / "parts") == []
        for key in keys:
            assert read(chunks, key) == payload(int.from_bytes(key, "big"))
        slot.close()


def test_two_processes_on_one_path_have_a_slot_each(tmp_path: Path) -> None:
    started = [writer(tmp_path) for _ in range(2)]
    try:
        assert len({path for _, path in started}) == 2
        assert disk_files.unowned(tmp_path) == set()
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert len(disk_files.unowned(tmp_path)) == 2


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
