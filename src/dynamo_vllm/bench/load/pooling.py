"""Runs `bench pooling`: embeddings or scored pairs per second, of several servers by turns."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from dynamo_vllm.bench.load.prompts import WORDS
from dynamo_vllm.bench.report.figures import quantile
from dynamo_vllm.bench.report.processes import ProcessWatch, usage_between
from dynamo_vllm.bench.report.rounds import (
    Range,
    alternating,
    json_file,
    print_line,
    ratios,
    spread,
    write_json,
)
from dynamo_vllm.config import build, checks
from dynamo_vllm.config.options import PoolingBenchOptions
from dynamo_vllm.config.rules import bench as rules
from dynamo_vllm.config.rules import bench_local
from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

QUERY_WORDS = 8
_HEADERS = {"content-type": "application/json"}


class Turn(msgspec.Struct, frozen=True):
    """What one server did in one round."""

    server: str
    round: int
    items_per_second: float
    tokens_per_second: float | None
    """By the server's own count; None if it does not tell."""
    p50_ms: float
    p99_ms: float
    cpu_us_per_item: dict[str, float | None]


def add_arguments(parser: build.Parser) -> None:
    build.add_options(parser, PoolingBenchOptions)


def run(given: argparse.Namespace) -> int:
    options = build.from_values(PoolingBenchOptions, vars(given), build.environment())
    checks.check_pooling_bench(options)
    file = json_file(options.json)
    turns: list[Turn] = []
    try:
        asyncio.run(_measure(options, turns))
    finally:
        write_json(file, {"version": 1, "settings": dataclasses.asdict(options), "turns": turns})
    print_line(report(options, turns))
    return 0


async def _measure(options: PoolingBenchOptions, turns: list[Turn]) -> None:
    servers = bench_local.servers(options)
    watch = ProcessWatch(rules.watched(options))
    limits = httpx.Limits(max_connections=options.concurrency)
    async with httpx.AsyncClient(timeout=options.timeout, limits=limits, trust_env=False) as client:
        models = {name: await _model(client, url, options.model) for name, url in servers.items()}
        for name, url in servers.items():
            first = next(bodies(options, models[name], 0))
            await _ask(client, url, options, first)
        for number, name in alternating(list(servers), options.rounds):
            made = list(bodies(options, models[name], number + 1))  # not in the time that is measured
            before = watch.sample()
            load = _Load(client, servers[name], options)
            seconds, items = await load.send(made), options.items * len(made)
            used = usage_between(before, watch.sample(), items)
            turn = Turn(
                name,
                number,
                items / seconds,
                load.tokens / seconds if load.tokens is not None else None,
                1000 * quantile(sorted(load.waits), 0.5),
                1000 * quantile(sorted(load.waits), 0.99),
                {
                    label: figures.cpu_us_per_token if figures else None
                    for label, figures in used.items()
                    if label.split(".")[0] in (label, name)
                },
            )
            turns.append(turn)
            print_line(f"round {number + 1}, {name}: {turn.items_per_second:.0f} items/s")


class _Load:
    """The requests of one turn."""

    def __init__(self, client: httpx.AsyncClient, url: str, options: PoolingBenchOptions) -> None:
        self._client = client
        self._url = url
        self._options = options
        self.waits: list[float] = []
        """Seconds of each answer."""
        self.tokens: int | None = 0

    async def send(self, requests: Sequence[bytes]) -> float:
        """Send all, some at a time, and return the seconds until the last answer."""
        left, began = iter(requests), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.concurrency):
                    group.create_task(self._one_after_the_other(left))
        except* StartError as failed:
            raise failed.exceptions[0] from None
        return time.perf_counter() - began

    async def _one_after_the_other(self, left: Iterator[bytes]) -> None:
        for body in left:
            asked = time.perf_counter()
            tokens = await _ask(self._client, self._url, self._options, body)
            self.waits.append(time.perf_counter() - asked)
            self.tokens = None if tokens is None or self.tokens is None else self.tokens + tokens


async def _model(client: httpx.AsyncClient, url: str, wanted: str | None) -> str:
    if wanted is not None:
        return wanted
    try:
        found = (await client.get(f"{url}/v1/models")).json()["data"]
        return str(found[0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as exc:
        raise StartError(f"{url}/v1/models names no model: {exc}; give --model") from None


def bodies(options: PoolingBenchOptions, model: str, round_number: int) -> Iterator[bytes]:
    """Yield the requests of a turn: the same for every server, others in every round."""
    chance = random.Random(f"{options.seed}/{round_number}")
    for _ in range(options.requests):
        texts = [" ".join(chance.choices(WORDS, k=options.words)) for _ in range(options.items)]
        body: dict[str, Any] = {"model": model}
        if options.api == "rerank":
            body |= {"query": " ".join(chance.choices(WORDS, k=QUERY_WORDS)), "documents": texts}
        else:
            body |= {"input": texts, "encoding_format": "base64" if options.base64 else "float"}
        yield json.dumps(body).encode()


async def _ask(client: httpx.AsyncClient, url: str, options: PoolingBenchOptions, body: bytes) -> int | None:
    """Send a request, check that all items are answered, and return the tokens that the server counted."""
    try:
        reply = await client.post(f"{url}/v1/{options.api}", content=body, headers=_HEADERS)
    except httpx.HTTPError as exc:
        raise StartError(f"POST {url}/v1/{options.api}: {exc or type(exc).__name__}") from None
    if reply.status_code != 200:
        raise StartError(f"POST {url}/v1/{options.api} answered {reply.status_code}: {reply.text[:300]}")
    answer = msgspec.json.decode(reply.content)
    # The runtime's frontend answers a ranking with the list alone.
    found = answer if isinstance(answer, list) else answer.get("data") or answer.get("results") or []
    if len(found) != options.items:
        raise StartError(f"{url} answered {len(found)} of {options.items} items")
    usage: Mapping[str, int] = {} if isinstance(answer, list) else answer.get("usage") or {}
    return usage.get("prompt_tokens")


def report(options: PoolingBenchOptions, turns: Sequence[Turn]) -> str:
    names = list(bench_local.servers(options))
    of = {name: [turn for turn in turns if turn.server == name] for name in names}
    lines = [f"{'SERVER':<16} {'ITEMS/S':>22} {'P50 MS':>10} {'P99 MS':>10}  CPU PER ITEM"]
    for name in names:
        rates = spread([turn.items_per_second for turn in of[name]])
        waits = [spread([getattr(turn, field) for turn in of[name]]) for field in ("p50_ms", "p99_ms")]
        used = ", ".join(f"{label} {figure} µs" for label, figure in _cpu(of[name]).items())
        lines.append(f"{name:<16} {rates!s:>22} {waits[0].median:>10.1f} {waits[1].median:>10.1f}  {used}")
    first = names[0]
    for other in names[1:]:
        share = ratios(*([turn.items_per_second for turn in of[one]] for one in (first, other)))
        lines.append(f"{first} / {other}: {share} × the items/s, round by round")
    return "\n".join(lines)


def _cpu(turns: Sequence[Turn]) -> dict[str, Range]:
    labels = turns[0].cpu_us_per_item if turns else {}
    found = {label: [turn.cpu_us_per_item.get(label) for turn in turns] for label in labels}
    return {
        label: spread([one for one in values if one is not None])
        for label, values in found.items()
        if any(values)
    }
