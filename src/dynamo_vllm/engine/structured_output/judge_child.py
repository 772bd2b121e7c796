"""The processes that judge guides: one that has loaded what judging needs, and those that are forked from it.

A schema of a few KB can take the compiler of grammars minutes and gigabytes, inside native code that nothing
can interrupt. Here that ends a process which has little time, little memory and nothing else to lose. What
judging means is a function's business; the processes know only its name.
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

    Judge = Callable[[dict[str, Any]], dict[str, Any]]

MODULE = __name__
TITLE = "dynamo-vllm guides"
NICENESS = 5
"""Of all of them: what streams to other clients comes first. Nobody but root can take it back."""
MOST_GUIDES = 500
"""What a process judges before another takes its place."""
WORN_SHARE = 0.25
"""Of its memory: what a process may have kept of the guides before; the limit is for each guide alone."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LENGTH = struct.Struct("!I")
_judge: list[Judge] = []


def run(fds: Sequence[int], call: str, payload: bytes) -> int:
    """Forked from a process that has imported vLLM: load, and become a zygote."""
    begin(socket.socket(fileno=fds[0]), call, payload, os.getppid())
    return 0


def main(argv: Sequence[str]) -> None:
    """The same started afresh; call and payload come through the connection."""
    connection = socket.socket(fileno=int(argv[0]))
    with connection.makefile("rb") as sent:
        (length,) = _LENGTH.unpack(sent.read(_LENGTH.size))
        call, payload = pickle.loads(sent.read(length))
    begin(connection, call, payload, os.getppid())


def order(call: str, payload: bytes) -> bytes:
    """What `main` reads."""
    content = pickle.dumps((call, payload))
    return _LENGTH.pack(len(content)) + content


def begin(connection: socket.socket, call: str, payload: bytes, owner: int) -> None:
    """Load the judge, say whether judges can be forked from here, and fork them as asked."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its owner
    os.nice(NICENESS)
    preload.name_process(TITLE)
    module, _, name = call.partition(":")
    try:
        _judge[:] = [getattr(importlib.import_module(module), name)(payload)]
        found = forking.other_threads()
        why_not = f"other threads are running: {', '.join(found)}" if found else None
    except Exception as exc:
        why_not = f"{type(exc).__name__}: {exc}"
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps({"refusal": why_not}).encode() + b"\n")
        if why_not is None:
            forking.serve(connection, owner)


def judge_all(fds: Sequence[int], memory_bytes: int, more_niceness: int) -> int:
    """Forked from that one: judge what comes, one guide after another."""
    connection = socket.socket(fileno=fds[0])
    preload.name_process(f"{TITLE}: judge")
    own_bytes = _data_bytes()
    _confine(own_bytes + memory_bytes, more_niceness)
    with connection.makefile("rwb") as lines:
        for count, line in enumerate(lines, 1):
            asked = json.loads(line)
            answer = _judged(asked)
            kept = _data_bytes() - own_bytes
            answer["worn"] = count >= MOST_GUIDES or kept > WORN_SHARE * memory_bytes
            lines.write(json.dumps(answer).encode() + b"\n")
            lines.flush()
            if answer["worn"]:
                break
    return 0


def _confine(memory_bytes: int, more_niceness: int) -> None:
    """Limits that hold whatever native code does; the one of time is set for each guide."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(more_niceness)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory ends, this process goes first


def _judged(asked: dict[str, Any]) -> dict[str, Any]:
    # Of processor time, which a busy machine does not use up; the kernel ends the process by SIGPROF.
    signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
    try:
        return _judge[0](asked["guide"])
    except MemoryError:
        return {"over": "memory"}
    except BaseException as exc:  # a panic of Rust is no Exception
        return {"refused": f"its compiler failed ({type(exc).__name__})"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts."""
    with open("/proc/self/statm", "rb") as numbers:
        return int(numbers.read().split()[5]) * _PAGE


if __name__ == "__main__":
    # Under its own name: the function that judges is found there by the forked processes.
    importlib.import_module("dynamo_vllm.engine.structured_output.judge_child").main(sys.argv[1:])
