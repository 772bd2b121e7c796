"""The commands that ask workers, over the real runtime, against endpoints that answer what a test wants."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.commands import run
from harness.controlled import NEVER, Controlled, controlled
from harness.processes import COMMAND, free_port
from harness.stack import environment
from harness.terminal import terminal

REFUSES = {"status": "error", "error": "wrong_state", "message": "it is asleep", "code": 409}
RANK = {"rank": 0, "running": 1, "waiting": 0, "kv_usage": 0.5, "hit_rate": None, "tokens_per_second": 7.0}
STATUS = {
    "role": "agg",
    "state": "ready",
    "models": ["tiny"],
    "adapters": [],
    "ranks": [RANK],
    "last_error": None,
}
NO_FRONTEND = ("--url", "http://127.0.0.1:1")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path, HOME=str(tmp_path), TMPDIR=str(tmp_path))


@pytest.fixture
def start(env: Mapping[str, str]) -> Iterator[Any]:
    """Starts an endpoint in a worker's place for each set of replies."""
    with ExitStack() as stack:

        def begin(*replies: Mapping[str, Any]) -> list[Controlled]:
            return [stack.enter_context(controlled(env, {"status": STATUS, **each})) for each in replies]

        yield begin


def short(worker: Controlled) -> str:
    return f"{worker.instance:016x}"[:6]


def test_one_worker_is_told_without_a_name_and_with_the_token(start: Any, env: dict[str, str]) -> None:
    (worker,) = start({"sleep": {"seconds": 0.2, "freed_bytes": None}})
    done = run({**env, "DYN_VLLM_ADMIN_TOKEN": "geheim"}, "sleep", "--level", "2", "--drain-seconds", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{short(worker)}: asleep after 0.2 s\n"
    body = {"level": 2, "drain_seconds": 3.0}
    assert worker.asked() == {"verb": "sleep", "body": body, "token": "geheim"}


def test_of_two_workers_each_is_told_and_one_refusal_is_code_1(start: Any, env: dict[str, str]) -> None:
    first, second = start({"wake_up": {"seconds": 1}}, {"wake_up": REFUSES})
    refused = run(env, "wake")
    assert refused.returncode == 2
    assert "there are 2 workers; give --all or --worker ID" in refused.stderr
    done = run(env, "wake", "--all")
    assert done.returncode == 1
    assert done.stdout == f"{short(first)}: awake after 1.0 s\n"
    assert done.stderr == f"{short(second)}: refused (409 wrong_state): it is asleep\n"
    assert run(env, "wake", "--worker", short(first)).returncode == 0


@pytest.mark.more
def test_worker_that_does_not_answer_is_reported_and_the_other_is_told(
    start: Any, env: dict[str, str]
) -> None:
    hung, well = start({"clear_kv_blocks": NEVER}, {"clear_kv_blocks": {}})
    done = run(env, "clear-kv", "--all", "--timeout", "8")
    assert done.returncode == 1
    assert done.stdout == f"{short(well)}: KV blocks cleared\n"
    assert done.stderr == f"{short(hung)}: no answer within 8 s; the worker may still be running it\n"


def test_worker_that_fails_at_it_is_not_said_to_be_gone(start: Any, env: dict[str, str]) -> None:
    start({})
    done = run(env, "pause")
    assert (done.returncode, "unexpected verb pause" in done.stderr) == (1, True)
    assert "cannot be reached" not in done.stderr


def test_killed_worker_does_not_make_the_other_need_a_name(start: Any, env: dict[str, str]) -> None:
    """Discovery shows it for some ten seconds more."""
    killed, well = start({}, {"resume": {}})
    killed.process.kill()
    killed.process.wait()
    with ThreadPoolExecutor(2) as pool:  # together: a busy machine takes seconds for each
        done, everyone = pool.map(lambda words: run(env, *words), (["resume"], ["resume", "--all"]))
    assert (done.returncode, done.stdout) == (0, f"{short(well)}: resumed\n")
    assert everyone.returncode == 1
    assert everyone.stderr.startswith(f"{short(killed)}: cannot be reached")


def test_port_of_a_worker_around_the_command_is_left_alone(start: Any, env: dict[str, str]) -> None:
    """As in a shell inside a worker's container; a worker that ends meanwhile is reported."""
    (worker,) = start({"sleep": NEVER})
    port = free_port()
    around = {**env, "DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"}
    asking = subprocess.Popen([*COMMAND, "sleep"], env=around, stderr=subprocess.PIPE, text=True)
    assert worker.asked()["verb"] == "sleep"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    worker.process.kill()
    _, error = asking.communicate(timeout=60)
    assert (asking.returncode, error) == (1, f"{short(worker)}: the worker ended before it answered\n")


# --- status -----------------------------------------------------------------------------------------------


def test_watch_redraws_in_place_and_ends_with_ctrl_c(start: Any, env: dict[str, str]) -> None:
    (worker,) = start({})
    command = [*COMMAND, "status", *NO_FRONTEND, "--watch", "0.2"]
    with terminal(command, env) as screen:
        screen.wait_for("TOK/S", times=3)
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(60) == 0
        screen.wait_for("\x1b[?1049l")
    before, _, after = screen.text.partition("\x1b[?1049l")
    assert before.startswith("\x1b[?1049h")
    assert before.count("\x1b[H") >= 3
    assert "\x1b[2J" not in before, "clearing the screen would flicker"
    assert after.count("TOK/S") == 1, "the last picture stays"
    pictures = before.count("TOK/S")
    asked = [worker.asked()["verb"] for _ in range(pictures)]
    assert asked == ["status"] * pictures


def test_watch_ends_when_nobody_reads(start: Any, env: dict[str, str]) -> None:
    start({})
    command = [*COMMAND, "status", *NO_FRONTEND, "--watch", "0.1"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        watching.stdout.readline()
        watching.stdout.close()
        assert watching.wait(60) == 0
        assert watching.stderr.read() == b""


# --- the line while an adapter is loaded ------------------------------------------------------------------


def test_terminal_shows_how_far_an_adapter_is(start: Any, env: dict[str, str]) -> None:
    entry = {"name": "sql", "state": "fetching", "done_bytes": 5_000_000, "total_bytes": 20_000_000}
    (worker,) = start({"load_lora": NEVER, "list_loras": {"loras": [entry], "count": 1, "capacity": 2}})
    with terminal([*COMMAND, "lora", "load", "sql", "/a"], env) as screen:
        screen.wait_for(f"\r\x1b[2Ksql: {short(worker)} fetching 5.0 MB of 20.0 MB (25 %)", times=2)
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(60) == 130
    assert "Traceback" not in screen.text
