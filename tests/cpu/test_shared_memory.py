"""Tests that the KV caches of several engines on one CPU together take a quarter of the free memory."""

from __future__ import annotations

import os
import re

import pytest

from cpu.stacks import Start
from dynamo_vllm.cli.start import serve
from dynamo_vllm.config.engine_rules import LEAST_CPU_CACHE
from dynamo_vllm.supervise.planning import plan
from dynamo_vllm.supervise.planning.process import COMMAND
from harness.forks import RUN_COMMAND
from harness.processes import free_port
from harness.stack import Stack, Worker

WORKERS = 4
QUICK = ("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32", "--served-model-name", "tiny")


def start_what_serve_would(start: Start, *words: str) -> Stack:
    """Starts workers as `serve` plans them, but forked; no cache size is given."""
    made = start.frontend()
    env = made.environment()
    del env["VLLM_CPU_KVCACHE_SPACE"]
    _, options = serve.understand([str(start.model), *QUICK, *words], env)
    for process in plan.make(options, env, made.folder / "discovery").workers:
        port, log = free_port(), made.folder / f"{process.name}.log"
        argv = [*process.argv[len(COMMAND) + 1 :], "--system-port", str(port)]
        task = ["dynamo_vllm.cli.start.worker", argv]
        made.add(start.warm.fork(RUN_COMMAND, task, process.env, log), port, log)
    return made.wait_ready(120)


def cache_bytes(worker: Worker) -> int:
    """Returns the cache size that the engine was given, and the one it uses by vLLM's count of blocks."""
    log = worker.log.read_text()
    given = re.search(
        rf"kv_cache_memory_bytes = (\d+): a quarter of the free memory for {WORKERS} engines together", log
    )
    assert given is not None, log[-3000:]
    assert worker.metric("vllm:cache_config_info", kv_cache_memory_bytes=given[1]) == 1
    return int(given[1])


@pytest.mark.long
def test_four_workers_share_what_one_would_take(start: Start) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    workers = start_what_serve_would(start, "--workers", str(WORKERS)).workers
    assert len(workers) == WORKERS
    # Others on the machine may have freed some at any time; more than all of it is never free.
    assert sum(map(cache_bytes, workers)) <= max(whole // 4, WORKERS * LEAST_CPU_CACHE)
