"""Runs inside the processes that check guides: a zygote that has loaded the checker, and forks of it.

A schema of a few KB can take the grammar compiler minutes and gigabytes, inside native code that cannot be
interrupted. In these processes the kernel enforces limits of CPU time and memory, and a crash harms nobody.
The function that checks is passed by name, so this module does not depend on vLLM.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

from dynamo_vllm import forking
from dynamo_vllm.engine.process import preload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Check = Callable[[dict[str, Any]], dict[str, Any]]

MODULE = __name__
TITLE = "dynamo-vllm guides"
NICENESS = 5
"""The niceness of these processes: streaming to clients has priority. Only root could lower it again."""
MOST_GUIDES = 500
"""How many guides a process checks before it is replaced."""
WORN_SHARE = 0.25
"""The share of its memory limit that a process may retain from earlier guides before it is replaced."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LENGTH = struct.Struct("!I")
_check: list[Check] = []


def run(fds: Sequence[int], call: str, payload: bytes) -> int:
    """Loads and becomes a zygote, in a process forked from one that has imported vLLM."""
    begin(socket.socket(fileno=fds[0]), call, payload, os.getppid())
    return 0


def main(argv: Sequence[str]) -> None:
    """Does the same in a new process, which receives `call` and `payload` through the connection."""
    connection = socket.socket(fileno=int(argv[0]))
    with connection.makefile("rb") as sent:
        (length,) = _LENGTH.unpack(sent.read(_LENGTH.size))
        call, payload = pickle.loads(sent.read(length))
    begin(connection, call, payload, os.getppid())


def start_message(call: str, payload: bytes) -> bytes:
    """Encodes the message that `main` reads."""
    content = pickle.dumps((call, payload))
    return _LENGTH.pack(len(content)) + content


def begin(connection: socket.socket, call: str, payload: bytes, owner: int) -> None:
    """Loads the checker, reports whether this process can fork, then forks on request."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # this process ends when its owner ends
    os.nice(NICENESS)
    preload.name_process(TITLE)
    module, _, name = call.partition(":")
    try:
        _check[:] = [getattr(importlib.import_module(module), name)(payload)]
        found = forking.other_threads()
        why_not = f"other threads are running: {', '.join(found)}" if found else None
    except Exception as exc:
        why_not = f"{type(exc).__name__}: {exc}"
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps({"refusal": why_not}).encode() + b"\n")
        if why_not is None:
            forking.serve(connection, owner)


def check_all(fds: Sequence[int], memory_bytes: int, more_niceness: int) -> int:
    """Checks one guide after another, in a process forked from the zygote."""
    connection = socket.socket(fileno=fds[0])
    preload.name_process(f"{TITLE}: checker")
    own_bytes = _data_bytes()
    _confine(own_bytes + memory_bytes, more_niceness)
    with connection.makefile("rwb") as lines:
        for count, line in enumerate(lines, 1):
            asked = json.loads(line)
            answer = _checked(asked)
            kept = _data_bytes() - own_bytes
            answer["worn"] = count >= MOST_GUIDES or kept > WORN_SHARE * memory_bytes
            lines.write(json.dumps(answer).encode() + b"\n")
            lines.flush()
            if answer["worn"]:
                break
    return 0


def _confine(memory_bytes: int, more_niceness: int) -> None:
    """Sets limits that native code cannot exceed; the limit of CPU time is set for each guide."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(more_niceness)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if the machine runs out of memory, the kernel kills this process first


def _checked(asked: dict[str, Any]) -> dict[str, Any]:
    # ITIMER_PROF counts CPU time, so a busy machine does not matter; at the limit SIGPROF ends the process.
    signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
    try:
        return _check[0](asked["guide"])
    except MemoryError:
        return {"over": "memory"}
    except BaseException as exc:  # a Rust panic is not an Exception
        return {"refused": f"its compiler failed ({type(exc).__name__})"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _data_bytes() -> int:
    """Returns the memory that RLIMIT_DATA counts."""
    with open("/proc/self/statm", "rb") as numbers:
        return int(numbers.read().split()[5]) * _PAGE


if __name__ == "__main__":
    # Not as __main__: the forked processes import this module by name and find `_check` in it.
    importlib.import_module("dynamo_vllm.engine.structured_output.checker_child").main(sys.argv[1:])
