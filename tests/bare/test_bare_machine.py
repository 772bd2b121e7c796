"""`serve` where there is nothing: no compiler, no tools, no home, a user without a name, a small disk."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import openai
import psutil
import pytest

from harness.bare import Machine, fill
from harness.processes import COMMAND, survivors
from harness.served import Serving, served
from harness.waiting import until

IS_ROOT = os.getuid() == 0
USER = 54321
TOOLS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "lscpu", "ps", "git", "nvidia-smi", "sh", "env")
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
only_root = pytest.mark.skipif(not IS_ROOT, reason="only root can mount a small disk")


@dataclass
class Bare:
    serving: Serving
    machine: Machine
    disk: Path
    """As this process sees it."""
    work: Path

    @property
    def processes(self) -> list[psutil.Process]:
        return self.serving.lasting()


@pytest.fixture(scope="module")
def bare(
    place: Path, launcher: dict[str, str], least: dict[str, str], readable: tuple[str, ...]
) -> Iterator[Bare]:
    tools, disk, work = (place / name for name in ("bin", "disk", "work"))
    for folder in (tools, disk, work):
        folder.mkdir()
    machine = Machine(env={**least, "PATH": str(tools), "TMPDIR": str(disk)}, folder=str(work))
    if IS_ROOT:
        assert USER not in {user.pw_uid for user in pwd.getpwall()}
        os.chown(work, USER, USER)
        machine = replace(machine, uid=USER, disks={str(disk): "32m"}, readable=readable)
    else:
        machine.env["XDG_CACHE_HOME"] = str(disk / "cache")  # a user with a name has a home and caches there
    with served(place, command=machine.command(*COMMAND), env=launcher, seconds=250) as serving:
        seen = Path(f"/proc/{serving.process.pid}/root{disk}") if IS_ROOT else disk
        made = Bare(serving, machine, seen, work)
        yield made
        below = serving.below()
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(60) == 0, serving.output.read_text()
        assert survivors(below, 5) == []


def test_nothing_is_there(bare: Bare) -> None:
    """What the other tests of this file rely on."""
    environments = [process.environ() for process in bare.processes]
    assert "HOME" not in environments[0]
    # A process that gives itself a name writes it over what the kernel shows here.
    shown = [found for found in environments if "PATH" in found]
    assert len(shown) >= 2, "serve and the frontend"
    for found in shown:
        assert [tool for tool in TOOLS if shutil.which(tool, path=found["PATH"])] == []
        assert not {"CC", "CXX", "CUDA_HOME", "LOGNAME", "USER"} & found.keys()
    for process in bare.processes:
        assert set(process.uids()) == {USER if IS_ROOT else os.getuid()}


def test_sampled_answer_comes(bare: Bare) -> None:
    found = bare.serving.chat(
        "What is 17 + 25?", temperature=0.7, top_p=0.9, extra_body={"top_k": 20, "min_p": 0.01}, seed=1
    )
    assert found.choices[0].message.content and found.usage.completion_tokens > 1


def test_answer_has_logprobs(bare: Bare) -> None:
    found = bare.serving.chat("What is 17 + 25?", temperature=0, logprobs=True, top_logprobs=3)
    tokens = found.choices[0].logprobs.content
    assert tokens and all(len(token.top_logprobs) == 3 for token in tokens)


def test_guided_answer_is_json(bare: Bare) -> None:
    guide = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    found = bare.serving.chat("What is 17 + 25?", temperature=0, response_format=guide)
    assert isinstance(json.loads(found.choices[0].message.content)["sum"], int)


def test_other_commands_find_it(bare: Bare, launcher: dict[str, str]) -> None:
    """They look in the folder that stands in for the home that is not there."""
    beside = bare.machine
    if IS_ROOT:
        beside = replace(bare.machine, beside=bare.serving.process.pid)
    done = subprocess.run(
        beside.command(*COMMAND, "status"), env=launcher, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "demo-chat" in done.stdout, done.stdout + done.stderr


def test_nothing_is_left_in_the_current_folder(bare: Bare) -> None:
    assert bare.serving.chat("Hello", temperature=0, max_tokens=3).choices
    assert list(bare.work.iterdir()) == [], "libraries without a home make a folder called ~"


@only_root
def test_disk_that_fills_up_stops_nothing(bare: Bare) -> None:
    (log,) = bare.disk.glob("*/.cache/dynamo-vllm/run/*/logs/frontend.log")
    before = bare.processes
    filled = fill(bare.disk)
    try:
        refused(bare)  # each is a line in the frontend's log
        until("a log that cannot be written", lambda: is_full(bare.disk) and grows_no_more(bare, log))
        for _ in range(3):
            assert bare.serving.chat("What is 17 + 25?", temperature=0).choices[0].message.content
            refused(bare)
        assert bare.processes == before
    finally:
        filled.unlink()
    written = log.stat().st_size
    until("logs that go on", lambda: refused(bare) and log.stat().st_size > written)
    assert bare.serving.chat("What is 17 + 25?", temperature=0).choices[0].message.content


def refused(bare: Bare) -> bool:
    with pytest.raises(openai.NotFoundError):
        bare.serving.stack.openai.completions.create(model="no-such-model", prompt="a")
    return True


def grows_no_more(bare: Bare, log: Path) -> bool:
    before = log.stat().st_size
    return refused(bare) and log.stat().st_size == before


def is_full(disk: Path) -> bool:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize == 0


@only_root
@pytest.mark.parametrize("words", [(), ("--run-dir", "run")], ids=["its own folder", "--run-dir"])
def test_disk_that_is_full_is_refused_in_one_line(
    words: tuple[str, ...],
    place: Path,
    launcher: dict[str, str],
    least: dict[str, str],
    readable: tuple[str, ...],
) -> None:
    disk = place / "full"
    disk.mkdir(exist_ok=True)
    machine = Machine(
        env={**least, "PATH": "", "HOME": str(disk)},
        folder=str(disk),
        uid=USER,
        disks={str(disk): "1m"},
        full=(str(disk),),
        readable=readable,
    )
    done = subprocess.run(
        machine.command(*COMMAND, "serve", "--port", "0", *words),
        env=launcher,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    line = done.stderr.strip()
    assert line.startswith(f"error: {disk}/")
    assert line.endswith(
        "No space left on device; free disk space there, or choose another folder with --run-dir"
    )
