"""The console's view of routing beside a running deployment, and what others say of the same requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from dynamo_vllm.config import runtime_env
from dynamo_vllm.config.options import FindOptions
from dynamo_vllm.console.decisions.service import Decisions
from dynamo_vllm.serving.watch import request_trace
from harness.processes import free_port
from harness.stack import Stack
from harness.waiting import until

T = TypeVar("T")
SELECTED = {
    "DYN_LOG": "warn,dynamo_kv_router::scheduling::selector=info",
    "DYN_LOGGING_JSONL": "1",
    "OTEL_BLRP_SCHEDULE_DELAY": "200",
}
"""For a frontend: it logs what it computed for the chosen worker."""


class Follower:
    """Runs `Decisions` on a loop in a thread of its own, as the console does in a process."""

    def __init__(self, decisions: Callable[[], Decisions]) -> None:
        self._loop = asyncio.new_event_loop()
        self._make = decisions
        self.decisions: Decisions
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self.decisions = self._make()
        self._task = self._loop.create_task(self.decisions.run())
        self._loop.call_soon(self._has_begun.set)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    def __enter__(self) -> Follower:
        self._thread.start()
        assert self._has_begun.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(30)

    def ask(self, question: Callable[[Decisions], T]) -> T:
        async def answer() -> T:
            return question(self.decisions)

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(30)

    def wait_for(self, question: Callable[[Decisions], Awaitable[T]]) -> T:
        async def answer() -> T:
            return await question(self.decisions)

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(30)

    @property
    def cpu_seconds(self) -> float:
        ident = self._thread.ident
        assert ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(ident))

    def blocks(self) -> int:
        """How many blocks it knows."""

        def count(decisions: Decisions) -> int:
            mirror = decisions._mirror
            return 0 if mirror is None else mirror.blocks.count

        return self.ask(count)

    def is_sure(self, workers: int) -> bool:
        """Whether it knows all of so many workers."""

        def sure(decisions: Decisions) -> bool:
            mirror = decisions._mirror
            if mirror is None:
                return False
            known = [w for w in mirror.blocks.workers if mirror.blocks.is_known(w, time.time())]
            return len(known) == workers and not mirror.snapshots.wanted

        return self.ask(sure)


@contextlib.contextmanager
def follower(made: Stack, trace_url: str | None = None) -> Iterator[Follower]:
    """`trace_url` is what the frontend was started with."""
    env = made.environment()
    options = FindOptions(
        namespace=env["DYN_NAMESPACE"],
        discovery_backend=env.get("DYN_DISCOVERY_BACKEND", "file"),
        file_kv=env["DYN_FILE_KV"],
        etcd_endpoints=env.get("ETCD_ENDPOINTS", FindOptions().etcd_endpoints),
        bind_host="127.0.0.1",
    )
    with pytest.MonkeyPatch.context() as patch:
        quiet = {"DYN_LOG": "off", "DYN_SYSTEM_PORT": "-1", "OTEL_EXPORT_ENABLED": "0"}
        for name, value in (runtime_env.reach(options) | runtime_env.hosts(options) | quiet).items():
            patch.setenv(name, value)
        with Follower(lambda: Decisions(options, env, trace_url)) as made_follower:
            yield made_follower


def trace_url() -> str:
    return request_trace.new_url(free_port())


@dataclass
class Answer:
    """One request, as its client saw it."""

    id: str
    prompt_tokens: int
    worker: int
    prefill_worker: int
    hit_rate: float
    engine_cached: int | None

    def router_blocks(self, block_size: int) -> float:
        """What the router took for cached at the worker it chose."""
        return round(self.hit_rate * -(-self.prompt_tokens // block_size), 3)


def ask(made: Stack, prompt: Sequence[int], max_tokens: int) -> Answer:
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["worker_id", "timing"]},
    }
    told = httpx.post(f"{made.url}/v1/completions", json=body, timeout=120)
    assert told.status_code == 200, told.text
    found = told.json()
    worker, details = found["nvext"]["worker_id"], found["usage"].get("prompt_tokens_details") or {}
    return Answer(
        found["id"].removeprefix("cmpl-"),
        len(prompt),
        int(worker["decode_worker_id"]),
        int(worker["prefill_worker_id"]),
        float(found["nvext"]["timing"].get("kv_hit_rate") or 0.0),
        details.get("cached_tokens"),
    )


def ask_all(made: Stack, prompts: Sequence[tuple[Sequence[int], int]], at_once: int) -> list[Answer]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda one: ask(made, *one), prompts))


def prompts(
    count: int,
    block: int,
    prefix: Callable[[random.Random], Sequence[int]],
    tokens: int = 60,
    made: random.Random | None = None,
) -> list[tuple[list[int], int]]:
    """Shared beginnings with other ends."""
    made = made or random.Random(5)
    return [
        (
            [*prefix(made), *(made.randrange(10, 900) for _ in range(made.randrange(1, 3 * block)))],
            made.randrange(2, tokens),
        )
        for _ in range(count)
    ]


def logits(log: Path) -> dict[tuple[str, str], float]:
    """The router's cost of the worker it chose, by request and type of worker."""
    found = {}
    for line in log.read_text().splitlines():
        if "Selected worker" in line and line.startswith("{"):
            row = json.loads(line)
            found[row["request_id"], row["worker_type"]] = float(row["logit"])
    return found


def served(spans: Path) -> dict[str, set[int]]:
    """From the spans of the workers' own processes."""
    found: dict[str, set[int]] = {}
    for line in spans.read_text().splitlines(keepends=True):
        row = json.loads(line) if line.endswith("\n") else {}
        told = row.get("attributes", {})
        if row.get("name") == "handle_payload" and told.get("endpoint") == "generate":
            found.setdefault(str(told["request_id"]), set()).add(int(told["instance_id"]))
    return found


def details(follower: Follower, answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """What the console says of each, once all records have come."""
    ids = {answer.id for answer in answers}

    def are_there() -> bool:
        rows = follower.ask(lambda one: one.requests(limit=1000))["requests"]
        return ids <= {row["id"] for row in rows}

    until("records of all requests", are_there)
    follower.ask(settle)
    return {one: follower.ask(lambda d, one=one: d.request(one)) or {} for one in ids}  # type: ignore[misc]


def settle(decisions: Decisions) -> None:
    """Nothing is active, and all records have come."""
    decisions._requests.settled = time.time()


def chosen(decision: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = [one for one in decision["candidates"] if one["is_chosen"]]
    return dict(found)
