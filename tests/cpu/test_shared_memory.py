"""Tests that the KV caches of several engines on one CPU together take a quarter of the free memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from dynamo_vllm.cli.start import serve
from dynamo_vllm.config.engine_rules import LEAST_CPU_CACHE
from dynamo_vllm.supervise.planning import plan
from dynamo_vllm.supervise.planning.process import COMMAND
from harness.processes import free_port
from harness.stack import Stack, Worker, stack
from harness.warm import Zygote

WORKERS = 4
QUICK = ("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32", "--served-model-name", "tiny")


def start_what_serve_would(made: Stack, warm: Zygote, model: Path, *words: str) -> None:
    """Starts workers as `serve` plans them, but forked; no cache size is given."""
    env = made.environment()
    del env["VLLM_CPU_KVCACHE_SPACE"]
    _, wanted = serve.understand([str(model), *QUICK, *words], env)
    for process in plan.make(wanted, env, made.folder / "discovery").workers:
        port, log = free_port(), made.folder / f"{process.name}.log"
        argv = [*process.argv[len(COMMAND) + 1 :], "--system-port", str(port)]
        task = ["dynamo_vllm.cli.start.worker", argv]
        forked = warm.fork("dynamo_vllm.cli.main:run_command", task, process.env, log)
        made.add(forked, port, log)


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
def test_four_workers_share_what_one_would_take(warm: Zygote, model: Path, tmp_path: Path) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with stack(tmp_path) as made:
        made.start_frontend()
        start_what_serve_would(made, warm, model, "--workers", str(WORKERS))
        made.wait_ready(120)
        taken = [cache_bytes(worker) for worker in made.workers]
    assert len(taken) == WORKERS
    # Others on the machine may have freed some at any time; more than all of it is never free.
    assert sum(taken) <= max(whole // 4, WORKERS * LEAST_CPU_CACHE)
