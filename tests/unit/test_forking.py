"""A zygote forks processes that are its owner's children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from harness.waiting import until

TESTS = Path(__file__).parents[1]


def ask(*script: str) -> Any:
    """What a program printed: zygotes need a process with one thread, which a test's is not."""
    lines = ["import json, os, signal, sys, threading", "from dynamo_vllm import forking", *script]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OF_THE_OWNER": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TASK = "forking.Task('harness.forked:{}', ({}), {{'A': 'b'}}, own_session={})"


def test_forked_process_is_the_owners_child_with_its_own_environment_and_exit_code() -> None:
    found = ask(
        "zygote = forking.make_zygote()",
        "r, w = os.pipe()",
        f"pid = zygote.fork({TASK.format('look', repr('hello') + ',', True)}, [w])",
        "_, status = os.waitpid(pid, 0)",
        "seen = json.loads(os.read(r, 65536))",
        "print(json.dumps([seen, pid, os.getpid(), os.waitstatus_to_exitcode(status), os.getppid()]))",
    )
    seen, pid, owner, code, _ = found
    assert (seen["said"], seen["pid"], seen["parent"], code) == ("hello", pid, owner, 7)
    assert seen["env"]["A"] == "b" and "OF_THE_OWNER" not in seen["env"]
    assert seen["leads_session"]


def test_forked_process_outlives_its_zygote_and_ends_with_its_owner() -> None:
    pid = ask(
        "zygote = forking.make_zygote()",
        "r, w = os.pipe()",
        f"pid = zygote.fork({TASK.format('wait_for_a_signal', '', False)}, [w])",
        "os.read(r, 1)",
        "zygote.close()",
        "os.kill(pid, 0)",
        "print(json.dumps(pid))",
    )
    until("its end, with the owner", lambda: not psutil.pid_exists(pid) or is_zombie(pid))


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_orphans_of_others_do_not_become_the_owners() -> None:
    parent, owner = ask(
        "zygote = forking.make_zygote()",
        "r, w = os.pipe()",
        f"os.waitpid(zygote.fork({TASK.format('look', repr('x') + ',', False)}, [w]), 0)",
        "os.read(r, 65536)",
        "middle = os.fork()",
        "if middle == 0:",
        "    told, tell = os.pipe()",
        "    if os.fork() == 0:",
        "        os.close(tell)",
        "        os.read(told, 1)",  # until the process in the middle is gone
        "        os.write(w, str(os.getppid()).encode())",
        "        os._exit(0)",
        "    os._exit(0)",
        "os.waitpid(middle, 0)",
        "print(json.dumps([int(os.read(r, 100)), os.getpid()]))",
    )
    assert parent != owner


def test_process_with_two_threads_makes_no_zygote() -> None:
    refusal = ask(
        "done = threading.Event()",
        "threading.Thread(target=done.wait, daemon=True).start()",
        "try:",
        "    forking.make_zygote()",
        "except forking.CannotFork as exc:",
        "    print(json.dumps(str(exc)))",
    )
    assert refusal.startswith("other threads are running: python")


def test_lost_zygote_and_a_task_that_cannot_be_read_are_told() -> None:
    task = TASK.format("look", repr("x") + ",", False)
    shut_down, killed, unreadable, code = ask(
        "sys.stderr = open(os.devnull, 'w')",
        "def refusal(zygote):",
        "    try:",
        f"        zygote.fork({task}, [1])",
        "    except forking.CannotFork as exc:",
        "        return str(exc)",
        "zygotes = [forking.make_zygote() for _ in range(3)]",
        "zygotes[0].connection.shutdown(2)",
        "os.kill(zygotes[1].pid, signal.SIGKILL)",
        "told = [refusal(zygotes[0]), refusal(zygotes[1])]",
        "real, forking.pickle.dumps = forking.pickle.dumps, lambda task: b'no task'",
        "told.append(refusal(zygotes[2]))",
        "forking.pickle.dumps = real",
        "r, w = os.pipe()",
        f"pid = zygotes[2].fork({task}, [w])",
        "print(json.dumps([*told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]))",
    )
    assert shut_down.startswith("the zygote") and killed.startswith("the zygote")
    assert unreadable.startswith("the forked process ended at once") and code == 7, "the zygote goes on"
