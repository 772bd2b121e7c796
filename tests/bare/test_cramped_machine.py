"""`serve` on one core under a quota, beside two busy programs, with a home that can only be read, while the
clock is set forward and back."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import openai
import psutil
import pytest

from harness import clock as clocks
from harness.bare import Machine
from harness.processes import COMMAND
from harness.served import Serving, served
from harness.waiting import until

pytestmark = pytest.mark.more

IS_ROOT = os.getuid() == 0
DAY = 24 * 3600
QUOTA = 0.8
GROUP = f"dynamo-vllm-test-{os.getpid()}"
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))\n"
"""Ends with whoever started it."""


@dataclass
class Cramped:
    serving: Serving
    core: int
    cgroup: Path | None
    home: Path
    temporary: Path
    clock: Path | None

    @property
    def processes(self) -> list[psutil.Process]:
        return self.serving.lasting()

    def answers(self) -> bool:
        return bool(self.serving.chat("Hello", max_tokens=3).choices)


@pytest.fixture(scope="module")
def cramped(place: Path, launcher: dict[str, str], least: dict[str, str]) -> Iterator[Cramped]:
    home, temporary, clock = place / "home", place / "tmp", place / "clock"
    home.mkdir()
    temporary.mkdir()
    clock.write_text("+0")
    core = max(os.sched_getaffinity(0))
    library = clocks.faketime()
    env = {**least, "PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(temporary)}
    if library is not None:
        env |= clocks.environment(library, clock)
    with quota() as cgroup:
        machine = Machine(env=env, core=core, cgroup=str(cgroup) if cgroup else None)
        if IS_ROOT:
            machine = replace(machine, read_only=(str(home),))
        else:
            home.chmod(0o555)
        with served(place, command=machine.command(*COMMAND), env=launcher, seconds=280) as serving:
            seen = Path(f"/proc/{serving.process.pid}/root{home}")
            with busy(core), busy(core):
                yield Cramped(serving, core, cgroup, seen, temporary, clock if library else None)


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    program = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        os.sched_setaffinity(program.pid, {core})
        yield
        assert program.poll() is None, "it was to run all the time"
    finally:
        program.kill()
        program.wait(30)


@contextlib.contextmanager
def quota() -> Iterator[Path | None]:
    """A control group that gets QUOTA of a core; None where none can be made."""
    folder = make_group()
    try:
        yield folder
    finally:
        if folder is not None:
            until("an empty control group", lambda: not (folder / "cgroup.procs").read_text())
            folder.rmdir()


def make_group() -> Path | None:
    """In either version of control groups."""
    period = 100_000
    limit = int(period * QUOTA)
    for above, settings in (
        ("/sys/fs/cgroup/cpu", {"cpu.cfs_period_us": f"{period}", "cpu.cfs_quota_us": f"{limit}"}),
        ("/sys/fs/cgroup", {"cpu.max": f"{limit} {period}"}),
    ):
        folder = Path(above, GROUP)
        with contextlib.suppress(OSError):  # not this version, or not allowed
            folder.mkdir()
            try:
                for name, value in settings.items():
                    (folder / name).write_text(value)
                return folder
            except OSError:
                folder.rmdir()
    return None


def test_answers_on_one_core_beside_two_busy_programs(cramped: Cramped) -> None:
    assert {tuple(process.cpu_affinity()) for process in cramped.processes} == {(cramped.core,)}
    found = cramped.serving.chat("What is 17 + 25?", temperature=0)
    assert found.choices[0].message.content == "17 + 25 = 42"


def test_answers_within_its_quota(cramped: Cramped) -> None:
    if cramped.cgroup is None:
        pytest.skip("no control group can be made here")
    members = set(map(int, (cramped.cgroup / "cgroup.procs").read_text().split()))
    assert {process.pid for process in cramped.processes} <= members
    told = dict(line.split() for line in (cramped.cgroup / "cpu.stat").read_text().splitlines())
    assert int(told["nr_periods"]) > 0, "the quota was in force"
    assert cramped.answers()


def test_home_that_can_only_be_read_is_no_obstacle(cramped: Cramped) -> None:
    with pytest.raises(OSError) as refused:
        (cramped.home / "new").touch()
    assert refused.value.errno in (errno.EROFS, errno.EACCES)
    assert cramped.answers()


def test_clock_that_jumps_stops_nothing(cramped: Cramped) -> None:
    if cramped.clock is None:
        pytest.skip(clocks.NEEDS)
    stream = cramped.serving.chat("Hello", max_tokens=100, stream=True, extra_body={"ignore_eos": True})
    try:
        next(iter(stream))
        for days in (1, -1, 0):
            cramped.clock.write_text(f"{days:+d}d")
            until("discovery to go by that clock", partial(all_touched, cramped, days), 60, every=0.2)
            until(f"an answer {days} days on", partial(answered, cramped, days), 60, every=0.2)
        reasons = [choice.finish_reason for chunk in stream for choice in chunk.choices]
        assert reasons[-1] == "length", "an answer goes on over a jump"
    finally:
        cramped.clock.write_text("+0d")
        stream.close()


def answered(cramped: Cramped, days: int) -> bool:
    """The frontend says when it made an answer."""
    try:
        created = cramped.serving.chat("Hello", max_tokens=1).created
    except openai.APIStatusError:  # for the second that it takes a worker to come back
        return False
    return bool(abs(created - time.time() - days * DAY) < DAY / 4)


def all_touched(cramped: Cramped, days: int) -> bool:
    now = time.time() + days * DAY
    try:
        times = [path.stat().st_mtime for path in cramped.temporary.glob("**/discovery/v1/*/*")]
    except FileNotFoundError:
        return False
    return times != [] and all(abs(found - now) < DAY / 4 for found in times)
