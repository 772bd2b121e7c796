"""Starts `dynamo-vllm serve` for a scenario, and finds its parts."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil

from harness import listening
from harness.processes import COMMAND, survivors
from harness.served import Serving, own_environment, served
from harness.stack import TESTS, Worker
from harness.warm import ENGINE_FLAGS, NOT_WARMED

FAKE = {"vocab_size": 1000, "token_ms": 5}


def fake_words(model: Path, *words: str, **spec: Any) -> list[str]:
    described = json.dumps({**FAKE, **spec})
    names = ["--model", str(model), "--served-model-name", "tiny"]
    return [*names, "--engine", "fake", "--fake-engine", described, *words]


@contextlib.contextmanager
def real(folder: Path, model: Path, *words: str) -> Iterator[Serving]:
    """`serve` with real engines, small ones that start without a warm-up."""
    names = ("--model", str(model), "--served-model-name", "tiny")
    with tempfile.TemporaryDirectory(prefix="f-") as short:  # a socket's path has at most 107 characters
        env = environment(folder, TMPDIR=short, **NOT_WARMED)
        with started(folder, *names, *ENGINE_FLAGS, *words, env=env) as serving:
            yield serving


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Nothing of the caller's settings, and a folder for temporary files of its own."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    env = own_environment(folder) | {"TMPDIR": str(temporary), **more}
    del env["DYN_VLLM_BIND_HOST"]  # what `serve` does by itself is to be seen
    return env


def launcher() -> dict[str, str]:
    """For `harness.bare`, which starts a command on a machine that lacks something."""
    modules = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(modules)}


@contextlib.contextmanager
def started(
    folder: Path,
    *words: str,
    command: Sequence[str] = COMMAND,
    env: Mapping[str, str] | None = None,
    seconds: float = 300,
) -> Iterator[Serving]:
    """`serve`, ready, with its run folder in `folder`."""
    env = env if env is not None else environment(folder)
    words = (*words, "--run-dir", str(folder / "run"))
    with served(folder, *words, command=command, env=env, seconds=seconds) as serving:
        yield serving


def workers(serving: Serving, role: str = "") -> list[Worker]:
    """By the list for Prometheus; forked ones carry the name of what they were forked from."""
    run = Path(f"/proc/{serving.process.pid}/root{_run_folder(serving)}")
    groups = json.loads((run / "prometheus.json").read_text())
    ports = [
        int(group["targets"][0].rsplit(":", 1)[1])
        for group in groups
        if "worker" in group["labels"]["job"] and group["labels"]["process"].startswith(role)
    ]
    owners = {one.port: one.pid for one in listening.listeners([p.pid for p in serving.below()])}
    logs = run / "logs"
    return [Worker(cast("Any", psutil.Process(owners[port])), port, logs) for port in ports if port in owners]


def _run_folder(serving: Serving) -> str:
    (line,) = [line for line in serving.output.read_text().splitlines() if "; logs in " in line]
    return line.partition("; logs in ")[2].removesuffix("/logs")


def pids(serving: Serving) -> list[int]:
    """Of the workers: what must not change."""
    return sorted(worker.pid for worker in workers(serving))


def stopped(serving: Serving, number: int, seconds: float = 120) -> None:
    """It ends by this signal as it should, and nothing of it is left."""
    below = serving.below()
    serving.process.send_signal(number)
    assert_left(serving, below, seconds)


def assert_left(serving: Serving, below: Sequence[psutil.Process], seconds: float = 120) -> None:
    """`serve` has ended well, and so has all that was below it."""
    code = serving.process.wait(seconds)
    assert code == 0, f"serve ended with {code}: {serving.output.read_text()[-500:]}"
    left = survivors(below, 30)
    assert left == [], f"still running: {left}"


def left_in(temporary: Path) -> list[str]:
    """Folders of workers that are still there."""
    return sorted(path.name for path in temporary.glob("dynamo-vllm-*"))
