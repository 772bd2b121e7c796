"""Logs that become too large, under a process that goes on writing."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dynamo_vllm.supervise.process.log_files import LogFiles, part
from harness.waiting import until

# Numbered lines without end, each as one write.
WRITER = """
import itertools, os
for number in itertools.count():
    os.write(1, b"line %d\\n" % number)
"""


@contextlib.contextmanager
def writing(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, "-c", WRITER], stdout=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_log_is_put_aside_again_and_again_under_its_writer(tmp_path: Path) -> None:
    log, files = tmp_path / "worker-1.log", LogFiles(tmp_path, 100_000, 2)
    with writing(log) as process:
        for _ in range(4):
            until("a long log", lambda: log.stat().st_size > files.max_bytes)
            assert await files.look() == [log]
        assert process.poll() is None
        until("it to write on", lambda: log.stat().st_size > 0)
    assert names(tmp_path) == ["worker-1.log", "worker-1.log.1", "worker-1.log.2"]
    written = "".join(found.read_text() for found in (part(log, ".2"), part(log, ".1"), log))
    numbers = [int(number) for number in re.findall(r"^line (\d+)$", written, re.MULTILINE)]
    assert numbers == sorted(numbers)
    assert len(numbers) > 0.5 * (numbers[-1] - numbers[0]), "few lines were lost, of one that only writes"


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


async def test_log_without_parts_is_emptied_and_one_within_its_bounds_stays(tmp_path: Path) -> None:
    log = tmp_path / "worker-1.log"
    log.write_text("x" * 1000)
    assert await LogFiles(tmp_path, 1000, 3).look() == []
    assert await LogFiles(tmp_path, 0, 3).look() == []
    assert await LogFiles(tmp_path / "gone", 1, 3).look() == []
    assert log.stat().st_size == 1000
    assert await LogFiles(tmp_path, 100, 0).look() == [log]
    assert names(tmp_path) == ["worker-1.log"]
    assert log.stat().st_size == 0


async def test_disk_without_room_costs_an_older_part_and_no_line_of_the_log(tmp_path: Path) -> None:
    log, files = tmp_path / "worker-1.log", LogFiles(tmp_path, 100, 2)
    log.write_text("now")
    part(log, ".1").write_text("before")
    part(log, ".2").write_text("long before")
    part(log, ".new").symlink_to("/dev/full")
    log.write_text("x" * 1000)
    assert await files.look() == []
    assert log.stat().st_size == 1000
    assert not part(log, ".2").exists() and part(log, ".1").read_text() == "before"
    assert names(tmp_path) == ["worker-1.log", "worker-1.log.1"]
    assert await files.look() == [log], "now there is room"
    assert part(log, ".2").read_text() == "before"
