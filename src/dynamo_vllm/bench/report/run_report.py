"""Writes the figures of a run as JSON and as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.bench.report.figures import StageFigures
from dynamo_vllm.bench.report.processes import ProcessFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 1
BUSY_CLIENT = 0.8
LATE_MS = 50.0


class ClientFigures(msgspec.Struct, frozen=True):
    """How busy the client processes were."""

    processes: int
    utilisation: float
    """CPU time divided by elapsed time, of the busiest client process."""
    cpu_us_per_token: float | None
    """The sum over all client processes."""
    late_ms: float
    """The longest delay with which a request was sent."""


class StageReport(StageFigures, frozen=True, kw_only=True):
    """The figures of a stage, and what the processes used for it."""

    processes: dict[str, ProcessFigures | None]
    client: ClientFigures


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    url: str
    settings: dict[str, Any]
    stages: list[StageReport]
    interrupted: bool = False


def to_json(report: RunReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def text(report: RunReport) -> str:
    """Return tables of all stages, with errors and warnings."""
    parts = [f"{report.url}  model {report.settings.get('model')}  {_prompts(report.settings)}", ""]
    parts.append(table(*_main_rows(report.stages)))
    if any(stage.processes for stage in report.stages):
        parts += ["", table(*_process_rows(report.stages))]
    errors = [error for stage in report.stages for error in _errors(stage)]
    warnings = [warning for stage in report.stages for warning in _warnings(stage)]
    if report.interrupted:
        warnings.append("stopped early; requests in flight were aborted and do not count")
    return "\n".join([*parts, *([""] if errors or warnings else []), *errors, *warnings])


def _prompts(settings: dict[str, object]) -> str:
    kind = settings.get("prompts")
    if kind == "trace":
        return f"trace {settings.get('trace')} in blocks of {settings.get('trace_block')} tokens"
    prefix = f"{settings.get('prefix_tokens')}+" if kind == "prefix" else ""
    return f"{kind} prompts, {prefix}{settings.get('input_tokens')}/{settings.get('output_tokens')} tokens"


def _main_rows(stages: Sequence[StageReport]) -> tuple[list[str], list[list[str]]]:
    head = [*("STAGE", "OK", "FAILED", "REQ/S", "TOK/S", "TTFT p50", "p90", "p99")]
    head += ("ITL p50", "p99", "TPOT p50", "E2E p50", "p99")
    rows = []
    for stage in stages:
        spreads = (
            *(stage.ttft_ms.p50, stage.ttft_ms.p90, stage.ttft_ms.p99),
            *(stage.itl_ms.p50, stage.itl_ms.p99, stage.tpot_ms.p50, stage.e2e_ms.p50, stage.e2e_ms.p99),
        )
        rate = (_short(stage.requests.per_second), _short(stage.tokens.output_per_second))
        rows.append(
            [stage.name, str(stage.requests.ok), str(stage.requests.failed), *rate, *map(_short, spreads)]
        )
    if any(stage.tokens.cached is not None for stage in stages):
        head.append("CACHED")
        for row, stage in zip(rows, stages, strict=True):
            row.append(_percent(stage.tokens.cached, stage.tokens.prompt))
    if any(stage.goodput for stage in stages):
        head.append("GOOD")
        for row, stage in zip(rows, stages, strict=True):
            row.append(f"{stage.goodput.fraction:.1%}" if stage.goodput else "–")
    return head, rows


def _process_rows(stages: Sequence[StageReport]) -> tuple[list[str], list[list[str]]]:
    head = ["STAGE", "PROCESS", "CPU s", "µs/token", "WITH CHILDREN s", "µs/token", "RSS MB"]
    rows = []
    for stage in stages:
        for label, used in stage.processes.items():
            if used is None:
                rows.append([stage.name, label, "ended", *("–" * (len(head) - 3))])
                continue
            figures = (
                *(used.cpu_seconds, used.cpu_us_per_token),
                *(used.tree_cpu_seconds, used.tree_cpu_us_per_token, used.rss_mb),
            )
            rows.append([stage.name, label, *map(_short, figures)])
    return head, rows


def _errors(stage: StageReport) -> list[str]:
    return [f"error: {stage.name}: {count} × {message}" for message, count in stage.errors.items()]


def _warnings(stage: StageReport) -> list[str]:
    found = []
    if stage.client.utilisation > BUSY_CLIENT:
        found.append(
            f"warning: {stage.name}: a client process was busy {stage.client.utilisation:.0%} of the time "
            f"and may have slowed the load; give more than --clients {stage.client.processes}"
        )
    if stage.client.late_ms > LATE_MS:
        found.append(f"warning: {stage.name}: a request was sent {stage.client.late_ms:.0f} ms late")
    return found


def _short(value: float | None) -> str:
    """Format a number with three significant digits."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(part: int | None, whole: int) -> str:
    return "–" if part is None or not whole else f"{part / whole:.1%}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table: names are aligned left, figures right."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    names = {at for at, name in enumerate(head) if name in ("STAGE", "PROCESS")}
    lines = (
        "  ".join(
            cell.ljust(width) if at in names else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
