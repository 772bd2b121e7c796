"""Faults of engine cores: two workers with vLLM on CPU and a tiny model under `serve`."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from faults.deployment import environment, started, workers
from faults.failures.workers import WORKERS, busy, is_whole
from faults.load import Load, long_answers
from faults.others import COMPLETIONS
from faults.scenario import Counts, Fault, Run, needs_cpu_engine
from harness.served import Serving
from harness.waiting import until

CLIENTS, TOKENS = 4, 100
RUNS = 2 * WORKERS
"""Of one deployment, which takes long to start: each worker is hit twice."""
HUNGRY, HUNGRY_BYTES = 701, 1 << 30
"""As in `hungry`, which only an engine core can import."""
NO_MEMORY = "not enough memory"
FLAGS = ("--max-model-len", "2048", "--dtype", "float32", "--num-gpu-blocks-override", "1024")
EXTENSION = ("--worker-extension-cls", "faults.failures.hungry.Hungry")


@contextlib.contextmanager
def two_engines(folder: Path, model: Path) -> Iterator[Serving]:
    words = (*engine_words(model), "--workers", str(WORKERS), "--unwell-seconds", "5", *EXTENSION)
    with started(folder, *words, env=environment_of_engines(folder)) as serving:
        yield serving


def engine_words(model: Path) -> list[str]:
    return ["--model", str(model), "--served-model-name", "tiny", *FLAGS]


def environment_of_engines(folder: Path) -> dict[str, str]:
    modules = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Two engines' threads on few cores only wait for each other.
    return environment(folder, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(modules))


def core_of(pid: int) -> psutil.Process:
    """The engine core of a worker."""
    below = psutil.Process(pid).children(recursive=True)
    (core,) = [process for process in below if "EngineCore" in " ".join(process.cmdline())]
    return core


def hit(serving: Serving, harm: Callable[[psutil.Process], None]) -> Counts:
    """The engine core of one worker fails in mid-stream."""
    with Load(serving.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        victim = busy(serving).pid
        core = core_of(victim)
        load.fault()
        harm(core)
        load.recovered(lambda: is_whole(serving, without=[victim]))
    assert is_gone(core), "the old core is still there"
    return load.counts()


def killed(run: Run) -> Counts:
    return hit(run.sites.get(two_engines, RUNS), psutil.Process.kill)


def stopped(run: Run) -> Counts:
    serving = run.sites.get(two_engines, RUNS)
    before = serving.process.written().count("was not ready for")
    counts = hit(serving, psutil.Process.suspend)
    assert serving.process.written().count("was not ready for") == before + 1, "`serve` did not replace it"
    return counts


def out_of_memory(run: Run) -> Counts:
    serving = run.sites.get(two_engines, RUNS)
    return hit(serving, lambda core: starve(serving, core))


def starve(serving: Serving, core: psutil.Process) -> None:
    """It gets a limit, and prompts that need more; the other worker answers them."""
    limit = core.memory_info().vms + HUNGRY_BYTES // 4
    resource.prlimit(core.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    body = {"model": "tiny", "prompt": [HUNGRY, 20, 21], "max_tokens": 3, "ignore_eos": True}

    def has_ended() -> bool:
        answer = serving.stack.post(COMPLETIONS, body)
        assert answer.status_code == 200, f"who needs memory gets {answer.status_code}: {answer.text[:200]}"
        return is_gone(core)

    until("the end of the core", has_ended)
    assert any(NO_MEMORY in log.read_text() for log in workers(serving)[0].log.glob("worker-*.log"))


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


SCENARIOS = (
    Fault(
        "engine-killed",
        "the engine core of one of two workers gets SIGKILL in mid-stream, as from the kernel's OOM killer",
        killed,
        needs_cpu_engine,
    ),
    Fault(
        "engine-stopped",
        "the engine core of one of two workers gets SIGSTOP in mid-stream: replaced after 20 s or so",
        stopped,
        needs_cpu_engine,
    ),
    Fault(
        "engine-out-of-memory",
        "a step of one of two engines gets no memory in mid-stream (RLIMIT_AS): its core ends, answers go on",
        out_of_memory,
        needs_cpu_engine,
    ),
)
