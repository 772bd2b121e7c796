from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dynamo_vllm.serving.usage import spool
from dynamo_vllm.serving.usage.record import FINISHED, UsageRecord, admitted
from dynamo_vllm.serving.usage.spool import Spool

WRITE_AND_DIE = """
import os, sys
from pathlib import Path
from dynamo_vllm.serving.usage.record import UsageRecord
from dynamo_vllm.serving.usage.spool import Spool
spool = Spool(Path(sys.argv[1]))
for number in range(3):
    spool.append(UsageRecord(f"r{number}", "p", "k", "m", 1, 0, 2, "finished", 5.0, "ledger"))
os.kill(os.getpid(), 9)
"""


def record(name: str) -> UsageRecord:
    return UsageRecord(name, "p", "k", "m", 1, 0, 2, FINISHED, 5.0, "ledger")


def test_records_of_a_killed_worker_are_found_once(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITE_AND_DIE, str(tmp_path)], check=False)
    for _ in range(2):
        ((records, file),) = list(Spool(tmp_path).left_behind())
        assert len(records) == 3
        file.leave()  # so that it is found again
    ours = Spool(tmp_path)
    ours.append(record("mine"))
    assert ours.has_left()
    ((records, file),) = list(ours.left_behind())
    assert [one.request_id for one in records] == ["r0", "r1", "r2"]
    assert list(Spool(tmp_path).left_behind()) == [], "another worker reads it"
    file.remove()
    assert not ours.has_left() and list(ours.left_behind()) == []


def test_a_record_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    ours = Spool(tmp_path)
    ours.append(record("whole"))
    ours.append(record("cut"))
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 3)
    assert [one.request_id for one in spool.read(path)] == ["whole"]


def test_nothing_is_left_after_all_was_taken(tmp_path: Path) -> None:
    ours = Spool(tmp_path / "usage")
    ours.append(record("one"))
    ours.empty()
    ours.close(is_empty=True)
    assert list((tmp_path / "usage").iterdir()) == []


def test_a_full_disk_loses_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Spool(tmp_path / "file" / "below").append(record("one"))


def test_metadata_of_no_gateway_is_nobodys() -> None:
    for text in (None, "", "one", "one two", "one two three four", " two three"):
        assert admitted(text) is None
    found = admitted("one two three")
    assert found is not None and found.metadata == "one two three"


def test_worker_with_the_process_id_of_a_killed_one_takes_its_counts_over(tmp_path: Path) -> None:
    """In a container every worker has the same process id."""
    killed = Spool(tmp_path)
    killed.append(record("a"))
    killed.close(is_empty=False)
    worker = Spool(tmp_path)
    worker.append(record("b"))
    assert worker.has_left()
    ((found, file),) = worker.left_behind()
    assert found == [record("a")]
    file.remove()
    assert not worker.has_left()
