"""Runs `bench scale`: measures several frontends with many workers, whose fake engines cost almost nothing.

Every deployment has as many frontends and workers as asked for, and a discovery folder of its own. Those with
the same number of workers run at the same time and get their load in turn, so that they can be compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dynamo_vllm.bench.load import command as load
from dynamo_vllm.bench.local.deployment import (
    FOLDER_PREFIX,
    START_SECONDS,
    Deployment,
    LocalProcess,
    deployment,
    get,
)
from dynamo_vllm.bench.local.scale_figures import Begun, Combination, load_figures, name_of, report
from dynamo_vllm.bench.report.processes import cpu_seconds
from dynamo_vllm.bench.report.rounds import alternating, json_file, print_line, write_json
from dynamo_vllm.config import build, checks
from dynamo_vllm.config.options import LoadOptions, ScaleOptions
from dynamo_vllm.config.rules import bench_local
from dynamo_vllm.engine.fake.cached_blocks import BLOCKS_PER_SEQUENCE
from dynamo_vllm.engine.process.cpu_threads import usable_cores
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.models.tiny import make_tiny_model
from dynamo_vllm.serving.descriptors import raise_limit
from dynamo_vllm.serving.plane import inotify

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Mapping, Sequence

MODEL = "tiny"
SEED = 1
REQUESTS_PER_STREAM = 8
FILES_PER_STREAM = 2
"""In a frontend: the client's connection, and the one on which the worker sends the answer."""
SPARE_FILES = 500
SECONDS_PER_MILLION_BLOCKS = 60.0
SETTLE_SECONDS = 3.0
IDLE_SECONDS = 5.0
WATCHES = 14
"""The inotify instances of a frontend with one model; a worker has one."""
_MB = 1024 * 1024
_MILLION = 1e6
_MOST_WARMUPS = 256
_WORKERS = "dynamo_component_router_worker_registered"
_EVENTS = "dynamo_component_kv_cache_events_applied"
_STORED = ('event_type="stored"', 'status="ok"')


def add_arguments(parser: build.Parser) -> None:
    build.add_options(parser, ScaleOptions)


def run(given: argparse.Namespace) -> int:
    environment = build.environment()
    options = build.from_values(ScaleOptions, vars(given), environment)
    checks.check_scale(options)
    raise_limit()
    refuse_too_few_files(options, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    inotify.refuse_used_up(watches_needed(options))
    file = json_file(options.json)
    found: list[Combination] = []
    head = {
        "version": 1,
        "machine": {"architecture": platform.machine(), "cores": usable_cores()},
        "settings": dataclasses.asdict(options),
    }
    try:
        measure(options, environment, found, lambda: write_json(file, {**head, "measured": found}))
    finally:  # also at SIGTERM and after an error
        if found:
            print_line(report(found))
    return 0


def refuse_too_few_files(options: ScaleOptions, limit: int) -> None:
    fewest = min(*bench_local.frontend_counts(options), *bench_local.worker_counts(options))
    needed = FILES_PER_STREAM * math.ceil(options.streams / fewest) + SPARE_FILES
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise ConfigError(
            f"--streams {options.streams} needs {needed} open files in one process, and the system allows "
            f"{limit}; raise it with 'ulimit -Hn {needed}' as root (a container: --ulimit "
            f"nofile={needed}, a service: LimitNOFILE={needed}), or give fewer streams or more frontends"
        )


def watches_needed(options: ScaleOptions) -> int:
    """Return how many inotify instances the deployments that run at the same time need."""
    frontends, variants = bench_local.frontend_counts(options), len(cached_counts(options))
    workers = max(bench_local.worker_counts(options)) * len(frontends)
    return variants * (workers + sum(frontends) * WATCHES) + inotify.FRONTEND


def cached_counts(options: ScaleOptions) -> list[int]:
    return [0, options.cached_blocks] if options.cached_blocks else [0]


def measure(
    options: ScaleOptions, environment: Mapping[str, str], found: list[Combination], save: Callable[[], None]
) -> None:
    """Measure every combination, add its figures to `found`, and save after every step."""
    deadline = time.monotonic() + (options.max_seconds or math.inf)
    sizes = list(itertools.product(bench_local.frontend_counts(options), cached_counts(options)))
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        model = make_tiny_model(Path(folder) / "model")
        for workers in bench_local.worker_counts(options):
            with contextlib.ExitStack() as stack:
                places: dict[str, Place] = {}
                for frontends, blocks in sizes:
                    name = name_of(frontends, workers, blocks)
                    if is_late(deadline, name):
                        return
                    here = stack.enter_context(deployment(Path(folder) / name, environment))
                    places[name] = Place.start(here, model, (frontends, workers, blocks), options)
                    found.append(places[name].figures)
                    save()
                watch_idle(places.values())
                for number, name in alternating(tuple(places), options.rounds):
                    if is_late(deadline, f"round {number + 1} of {name}"):
                        return
                    places[name].measure(options)
                    save()
                    print_line(f"round {number + 1} of {options.rounds}: {name}: {places[name].line()}")


def is_late(deadline: float, what: str) -> bool:
    late = time.monotonic() > deadline
    if late:
        print_line(f"--max-seconds is over: {what} and what follows is left out")
    return late


@dataclasses.dataclass
class Place:
    """A running deployment, and its figures."""

    here: Deployment
    frontends: list[LocalProcess]
    workers: list[LocalProcess]
    figures: Combination

    @classmethod
    def start(cls, here: Deployment, model: Path, size: tuple[int, int, int], options: ScaleOptions) -> Place:
        frontends, workers, blocks = size
        print_line(f"{name_of(*size)}: starting")
        fronts = [start_frontend(here, f"frontend-{number}") for number in range(frontends)]
        here.wait("the frontends", lambda: all(is_up(front) for front in fronts))
        made = []
        for number in range(workers):
            wait_for_a_turn(here, fronts[0], number)
            spec = json.dumps(fake_engine(number, workers, blocks, options))
            args = ("--model", str(model), "--served-model-name", MODEL)
            made.append(
                here.start_worker(f"worker-{number}", *args, "--engine", "fake", "--fake-engine", spec)
            )
        begun = begin(here, fronts, workers, blocks)
        late_front = start_frontend(here, "frontend-late")
        here.wait("the late frontend", lambda: is_up(late_front))
        late = begin(here, [late_front], workers, blocks)
        here.stop(late_front)
        here.wait("the model", lambda: all(get(f"{front.url}/health") is not None for front in fronts))
        print_line(f"{name_of(*size)}: all workers listed after {begun.list_seconds:.1f} s")
        return cls(here, fronts, made, Combination(*size, begun, late))

    def measure(self, options: ScaleOptions) -> None:
        """Put a load on all frontends, and add its figures."""
        fronts, workers = self.frontends, self.workers
        ramp = options.ramp_seconds
        requests = options.requests or options.streams * (1 if ramp else REQUESTS_PER_STREAM)
        asked = LoadOptions(
            url=fronts[0].url,
            model=MODEL,
            seed=SEED,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            concurrency=None if ramp else str(options.streams),
            rate=str(options.streams / ramp) if ramp else None,
            arrivals="even",
            requests=requests,
            warmup=0 if options.token_ms else min(options.streams, _MOST_WARMUPS),
            clients=client_count(bench_local.frontend_counts(options), usable_cores()),
            watch=tuple(f"{process.name}={process.pid}" for process in (*fronts, *workers)),
        )
        outcome = load.measure(asked, more_urls=[front.url for front in fronts[1:]])
        self.figures.rounds.append(load_figures(outcome, [f.name for f in fronts], [w.name for w in workers]))

    def cpu_of_workers(self) -> float:
        return sum(cpu_seconds(psutil.Process(worker.pid)) for worker in self.workers)

    def line(self) -> str:
        last = self.figures.rounds[-1]
        return f"{last.tokens_per_second:.0f} tokens/s, {last.failed} of {last.ok + last.failed} failed"


def start_frontend(here: Deployment, name: str) -> LocalProcess:
    return here.start_frontend(name, "--router", "kv")


def wait_for_a_turn(here: Deployment, front: LocalProcess, started: int) -> None:
    """Wait until few enough workers are starting: each needs a core for most of a second."""
    most = 2 * usable_cores()
    here.wait("workers to start", lambda: started - count_of(front, _WORKERS) < most)


def fake_engine(number: int, workers: int, blocks: int, options: ScaleOptions) -> dict[str, object]:
    """Return what the fake engine does. Worker n announces prompts n, n + workers, … of the load."""
    spec: dict[str, object] = {"token_ms": options.token_ms}
    if blocks:
        spec["total_kv_blocks"] = blocks
        spec["cached"] = [{"count": blocks, "seed": f"{SEED}/0", "first": number, "step": workers}]
    return spec


def client_count(frontends: Sequence[int], cores: int) -> int:
    """Return a number of client processes that can be spread evenly over each number of frontends."""
    step = math.lcm(*frontends)
    return step * math.ceil(max(1, cores // 2) / step)


def is_up(front: LocalProcess) -> bool:
    return get(f"{front.url}/instances") is not None


def count_of(front: LocalProcess, name: str, *labels: str) -> float:
    return total(get(f"{front.url}/metrics") or "", name, *labels)


def total(page: str, name: str, *labels: str) -> float:
    """Add up the series of a metric. A parser would need a core to look often at the page of many workers."""
    lines = (line for line in page.splitlines() if line.startswith(f"{name}{{"))
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))


def begin(here: Deployment, fronts: Sequence[LocalProcess], workers: int, blocks: int) -> Begun:
    """Wait until the routers of these frontends know all workers and their blocks."""
    began = time.monotonic()
    here.wait(f"{workers} workers", lambda: all(count_of(front, _WORKERS) == workers for front in fronts))
    listed = time.monotonic()
    if blocks:
        events = workers * math.ceil(blocks / BLOCKS_PER_SEQUENCE)
        limit = START_SECONDS + SECONDS_PER_MILLION_BLOCKS * workers * blocks / _MILLION
        print_line(f"waiting for {workers * blocks} cached blocks")
        here.wait(
            f"{events} KV events",
            lambda: all(count_of(front, _EVENTS, *_STORED) >= events for front in fronts),
            limit,
        )
    ended = time.monotonic()
    processes = [psutil.Process(front.pid) for front in fronts]
    return Begun(
        list_seconds=round(listed - began, 3),
        blocks_seconds=round(ended - began, 3) if blocks else None,
        cpu_seconds=round(statistics.fmean(map(cpu_seconds, processes)), 2),
        rss_mb=round(statistics.fmean(process.memory_info().rss for process in processes) / _MB, 1),
    )


def watch_idle(places: Collection[Place]) -> None:
    """Measure what the workers of all deployments need without requests."""
    time.sleep(SETTLE_SECONDS)
    before = [place.cpu_of_workers() for place in places]
    time.sleep(IDLE_SECONDS)
    for place, seconds in zip(places, before, strict=True):
        used = (place.cpu_of_workers() - seconds) / IDLE_SECONDS / len(place.workers)
        place.figures.idle_percent = round(100 * used, 2)
