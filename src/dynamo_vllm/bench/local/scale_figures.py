"""The figures of `bench scale`, and their table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.bench.report.rounds import spread
from dynamo_vllm.bench.report.run_report import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.bench.http.answers import Answer
    from dynamo_vllm.bench.load.command import LoadOutcome

_MILLION = 1e6
_SPREAD = ("tokens_per_second", "frontend_us", "worker_us")


class Begun(msgspec.Struct, frozen=True):
    """When one or several frontends knew all workers, and what that took; the mean if they are several."""

    list_seconds: float
    """Until the routers of all had all workers."""
    blocks_seconds: float | None
    """Until they had all cached blocks."""
    cpu_seconds: float
    rss_mb: float


class LoadFigures(msgspec.Struct, frozen=True):
    """The figures of one load."""

    ok: int
    failed: int
    streams: int
    """The most streams that were open at the same time."""
    tokens: int
    tokens_per_second: float
    frontend_us: float
    """CPU time of all frontends per token, in microseconds."""
    worker_us: float
    client_us: float
    client_utilisation: float
    ttft_ms: float | None
    """The median."""
    frontend_rss_mb: float
    """Memory of a frontend after the load: the mean."""
    worker_rss_mb: float
    errors: dict[str, int]


class Combination(msgspec.Struct):
    """A deployment and its figures."""

    frontends: int
    workers: int
    cached_blocks: int
    """Of each worker."""
    begun: Begun
    """From the start of the last worker."""
    late: Begun
    """From the moment when a frontend that was started last answered."""
    idle_percent: float = 0.0
    """CPU time of a worker without requests: the mean, in percent of a core."""
    rounds: list[LoadFigures] = []

    @property
    def name(self) -> str:
        return name_of(self.frontends, self.workers, self.cached_blocks)


def name_of(frontends: int, workers: int, blocks: int) -> str:
    return f"{frontends} × {workers}" + (f", {blocks} blocks" if blocks else "")


def load_figures(outcome: LoadOutcome, frontends: Sequence[str], workers: Sequence[str]) -> LoadFigures:
    stage = outcome.report.stages[0]
    used = {name: figures for name, figures in stage.processes.items() if figures is not None}

    def cost(names: Sequence[str]) -> float:
        return sum(used[name].cpu_us_per_token or 0.0 for name in names if name in used)

    def memory(names: Sequence[str]) -> float:
        return statistics.fmean([used[name].rss_mb for name in names if name in used] or [0.0])

    return LoadFigures(
        ok=stage.requests.ok,
        failed=stage.requests.failed,
        streams=most_at_once(outcome.stages[0].answers),
        tokens=stage.tokens.output,
        tokens_per_second=stage.tokens.output_per_second,
        frontend_us=round(cost(frontends), 2),
        worker_us=round(cost(workers), 2),
        client_us=stage.client.cpu_us_per_token or 0.0,
        client_utilisation=stage.client.utilisation,
        ttft_ms=stage.ttft_ms.p50,
        frontend_rss_mb=round(memory(frontends), 1),
        worker_rss_mb=round(memory(workers), 1),
        errors=stage.errors,
    )


def most_at_once(answers: Sequence[Answer]) -> int:
    """Return how many requests were in flight at the busiest moment."""
    changes = [(answer.sent, 1) for answer in answers] + [(answer.ended, -1) for answer in answers]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def report(found: Sequence[Combination]) -> str:
    """Return a table of all combinations, and what the cached blocks cost."""
    head = ["FRONTENDS × WORKERS", "LISTED s", "LATE s", "TOK/S", "FRONTEND µs/token", "WORKER µs/token"]
    head += ["TTFT p50", "STREAMS", "FAILED", "RSS MB before", "after", "IDLE WORKER %"]
    plain = {(one.frontends, one.workers): one for one in found if not one.cached_blocks}
    lines = [table(head, [row(one) for one in found])]
    lines += [
        blocks_line(one, without)
        for one in found
        if one.cached_blocks and (without := plain.get((one.frontends, one.workers)))
    ]
    return "\n".join(lines)


def row(one: Combination) -> list[str]:
    rounds = one.rounds
    firsts = [r.ttft_ms for r in rounds if r.ttft_ms is not None]
    cells = [one.name, f"{one.begun.list_seconds:.2f}", f"{one.late.list_seconds:.2f}"]
    if not rounds:
        return [*cells, *["–"] * 6, f"{one.begun.rss_mb:.0f}", "–", f"{one.idle_percent:.2f}"]
    columns = ([getattr(r, field) for r in rounds] for field in _SPREAD)
    cells += [*(str(spread(column)) for column in columns), str(spread(firsts)) if firsts else "–"]
    cells += [str(max(r.streams for r in rounds)), str(sum(r.failed for r in rounds))]
    memory = [f"{one.begun.rss_mb:.0f}", f"{rounds[-1].frontend_rss_mb:.0f}"]
    return [*cells, *memory, f"{one.idle_percent:.2f}"]


def blocks_line(one: Combination, without: Combination) -> str:
    """Return what the blocks cost a frontend, beyond what it costs without them."""
    millions = one.workers * one.cached_blocks / _MILLION
    memory = (one.begun.rss_mb - without.begun.rss_mb) / millions
    cpu = (one.begun.cpu_seconds - without.begun.cpu_seconds) / millions
    late = (one.late.rss_mb - without.late.rss_mb) / millions
    return (
        f"{one.name}: the routers had them {one.begun.blocks_seconds:.1f} s after the last worker's start, "
        f"that of a late frontend after {one.late.blocks_seconds:.1f} s; a frontend needs "
        f"{memory:.0f} MB (late {late:.0f} MB) and {cpu:.1f} s of CPU time for a million blocks"
    )
