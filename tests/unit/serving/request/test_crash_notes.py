"""What workers of one folder know of each other's deaths."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dynamo.llm import HttpError
from dynamo.llm.exceptions import EngineShutdown

from dynamo_vllm.errors import EngineDead, NotTriedAgain
from dynamo_vllm.serving.request import crash_notes
from dynamo_vllm.serving.request.crash_notes import CrashNotes
from harness.fakes import FakeContext, FakeSender, make_worker, request

DEADLY = 99
WORKER = """
import sys
from dynamo_vllm.serving.request.crash_notes import CrashNotes
notes = CrashNotes(sys.argv[1])
with notes.waiting(sys.argv[2]):
    print("noted", flush=True)
    sys.stdin.read()
"""


def dead(folder: Path, *request_ids: str, answered: str = "") -> None:
    """A worker that died with these requests."""
    notes = CrashNotes(str(folder))
    for request_id in request_ids:
        note = notes.waiting(request_id)
        if request_id == answered:
            note.answered()
    notes.died()


def test_request_of_two_dead_workers_is_refused_and_others_are_not(tmp_path: Path) -> None:
    dead(tmp_path, "one", "both", "twice answered", answered="twice answered")
    notes = CrashNotes(str(tmp_path))
    notes.waiting("both").answered()
    dead(tmp_path, "both", "twice answered", answered="twice answered")
    with pytest.raises(NotTriedAgain, match="it crashed 2 workers before its first token"):
        notes.waiting("both")
    for other in ("one", "twice answered", "never seen"):
        notes.waiting(other).answered()


def test_requests_of_a_worker_count_when_it_is_killed(tmp_path: Path) -> None:
    notes = CrashNotes(str(tmp_path))
    with worker_with("moved", tmp_path) as one, worker_with("moved", tmp_path) as other:
        one.kill()
        one.wait()
        notes.waiting("moved").answered()
        other.kill()
        other.wait()
        with pytest.raises(NotTriedAgain):
            notes.waiting("moved")


@contextlib.contextmanager
def worker_with(request_id: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has noted this request and waits."""
    words = [sys.executable, "-c", WORKER, str(folder), request_id]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "noted\n"
        try:
            yield process
        finally:
            process.kill()


def test_places_are_used_again(tmp_path: Path) -> None:
    notes = CrashNotes(str(tmp_path))
    for number in range(50):
        with notes.waiting(str(number)):
            pass
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 16


def test_folder_that_cannot_be_used_costs_the_notes_only(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with CrashNotes(str(taken)).waiting("r"):
        pass
    with CrashNotes(None).waiting("r") as note:
        note.answered()
    notes = CrashNotes(str(tmp_path / "folder"))
    shutil.rmtree(tmp_path / "folder")
    with notes.waiting("r"):
        pass


def test_full_disk_costs_the_note_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    notes = CrashNotes(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with notes.waiting("r"):
            pass
    notes.waiting("s")
    notes.died()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 16


def test_files_of_long_dead_workers_go_with_the_next_start(tmp_path: Path) -> None:
    dead(tmp_path, "r")
    (old,) = tmp_path.iterdir()
    CrashNotes(str(tmp_path)).died()
    assert old.exists()
    os.utime(old, (0, old.stat().st_mtime - 2 * crash_notes.KEPT_SECONDS))
    CrashNotes(str(tmp_path)).died()
    assert not old.exists()


async def test_worker_whose_engine_died_leaves_its_requests_noted(tmp_path: Path) -> None:
    for kind in (EngineShutdown, EngineShutdown, HttpError):
        worker = await make_worker(die_on_token=DEADLY)
        worker.serve(crash_notes=CrashNotes(str(tmp_path)))
        await worker.generate(request(), FakeContext("harmless"), FakeSender())
        with pytest.raises(kind):
            await worker.generate(request([DEADLY]), FakeContext("deadly"), FakeSender())
    assert not worker.deaths, "the third was not asked"


def test_refused_requests_leave_no_note(tmp_path: Path) -> None:
    notes = CrashNotes(str(tmp_path))
    with pytest.raises(ValueError), notes.waiting("r"):
        raise ValueError
    notes.died()
    with pytest.raises(EngineDead), CrashNotes(str(tmp_path)).waiting("s"):
        raise EngineDead("gone")
    texts = [file.read_bytes() for file in tmp_path.iterdir()]
    assert sorted(map(any, texts)) == [False, True]
