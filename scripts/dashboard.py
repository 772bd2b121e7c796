"""Writes the Grafana dashboard: `python scripts/dashboard.py`; with --check it only says whether it is fresh.

The table below is the dashboard: rows of panels, each with its unit and its queries. Everything that Grafana
wants beyond that is made from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy" / "observability" / "grafana" / "dashboard.json"
COLUMNS = 24
HEIGHT = {"timeseries": 8, "stat": 4}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

M = '{model=~"$model"}'
W = '{process=~"$process"}'
GENERATE = '{dynamo_endpoint="generate", process=~"$process"}'
CLIENTS = "validation|not_found|cancelled|not_implemented"
OURS = f'{{model=~"$model", status="error", error_type!~"{CLIENTS}"}}'
Query = tuple[str, str]
"""A query, and the legend of its lines."""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    """Grafana's name of the unit: s, reqps, percentunit, short, bytes, …"""
    queries: tuple[Query, ...]
    help: str = ""
    kind: str = "timeseries"
    width: int = 8


class Row:
    def __init__(self, title: str, *panels: Panel) -> None:
        self.title = title
        self.panels = panels


def legend(by: str) -> str:
    """Return the labels that distinguish the lines."""
    return " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)


def summed(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


def rate(metric: str, selector: str = "", by: str = "", name: str = "") -> Query:
    return f"{summed(by)} (rate({metric}{selector}[$__rate_interval]))", name or legend(by)


def increase(metric: str, selector: str = "", by: str = "", name: str = "") -> Query:
    return f"{summed(by)} (increase({metric}{selector}[$__rate_interval]))", name or legend(by)


def total(metric: str, selector: str = "", by: str = "", name: str = "") -> Query:
    return f"{summed(by)} ({metric}{selector})", name or legend(by)


def each(metric: str, selector: str, by: str) -> Query:
    return f"{metric}{selector}", legend(by)


def share(part: str, whole: str, selector: str = "", by: str = "", name: str = "") -> Query:
    return f"{rate(part, selector, by)[0]} / {rate(whole, selector, by)[0]}", name or legend(by)


def quantile(of: float, metric: str, selector: str = "", by: str = "") -> Query:
    inner = rate(f"{metric}_bucket", selector, f"{by}, le" if by else "le")[0]
    return f"histogram_quantile({of}, {inner})", legend(by) or f"p{of * 100:.0f}"


def p95(metric: str, selector: str = "", by: str = "") -> Query:
    return quantile(0.95, metric, selector, by)


def quantiles(metric: str, selector: str) -> tuple[Query, ...]:
    """Return the median and the high percentiles."""
    return tuple(quantile(of, metric, selector) for of in (0.5, 0.95, 0.99))


def stat(title: str, unit: str, query: Query, help: str = "") -> Panel:
    return Panel(title, unit, ((query[0], ""),), help, "stat", 4)


def panel(title: str, unit: str, *queries: Query, help: str = "") -> Panel:
    return Panel(title, unit, queries, help)


REQUESTS = "dynamo_frontend_requests_total"
TTFT = "dynamo_frontend_time_to_first_token_seconds"
ITL = "dynamo_frontend_inter_token_latency_seconds"
MADE = "dynamo_frontend_output_tokens_total"
ERRORS = f"({rate(REQUESTS, OURS)[0]} or vector(0)) / {rate(REQUESTS, M)[0]}"

OVERVIEW = Row(
    "Overview",
    stat("Requests", "reqps", rate(REQUESTS, M)),
    stat("Errors on our side", "percentunit", (ERRORS, ""), "Without wrong requests and clients that left."),
    stat("First token, p95", "s", p95(TTFT, M)),
    stat("Between tokens, p95", "s", p95(ITL, M)),
    stat("Tokens made per second", "short", rate(MADE, M)),
    stat("In flight", "short", total("dynamo_frontend_inflight_requests", M)),
    panel("Requests by outcome", "reqps", rate(REQUESTS, M, "status, error_type")),
    panel("Time to first token", "s", *quantiles(TTFT, M)),
    panel("Time between tokens", "s", *quantiles(ITL, M)),
    panel(
        "Tokens per second",
        "short",
        rate(MADE, M, name="made"),
        rate("dynamo_frontend_input_sequence_tokens_sum", M, name="in prompts"),
        rate("dynamo_frontend_cached_tokens_sum", M, name="of these cached"),
    ),
    panel("Whole requests", "s", *quantiles("dynamo_frontend_request_duration_seconds", M)),
    panel(
        "In flight and waiting",
        "short",
        total("dynamo_frontend_inflight_requests", M, "model", "{{model}} in flight"),
        total("dynamo_frontend_queued_requests", M, "model", "{{model}} without a token"),
    ),
    panel("Tokens made, by worker", "short", rate("dynamo_component_generated_tokens_total", W, "process")),
    panel("Running, by worker", "short", total("dynamo_component_requests_running", W, "process")),
    panel("Queued, by worker", "short", total("dynamo_component_requests_waiting", W, "process")),
)
ROUTING = Row(
    "KV cache and routing",
    panel(
        "KV cache in use",
        "percentunit",
        each("dynamo_component_gpu_cache_usage_percent", W, "process, dp_rank"),
    ),
    panel(
        "Prefix cache hits",
        "percentunit",
        share("dynamo_component_prefix_hits_total", "dynamo_component_prefix_queries_total", W, "process"),
        help="Share of the prompt tokens that an engine found in its cache, or fetched from another.",
    ),
    panel(
        "Prompt share the router knew to be cached",
        "percentunit",
        share(
            "dynamo_component_router_kv_hit_rate_sum",
            "dynamo_component_router_kv_hit_rate_count",
            name="at the chosen worker",
        ),
        help="With --router kv, as the next five.",
    ),
    panel(
        "Cached tokens",
        "short",
        rate(
            "dynamo_component_router_kv_selected_cached_prefix_tokens_total", M, name="at the chosen worker"
        ),
        rate("dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total", M, name="at the best"),
    ),
    panel(
        "KV events applied", "ops", rate("dynamo_component_kv_cache_events_applied", by="event_type, status")
    ),
    panel(
        "Workers the router knows",
        "short",
        total("dynamo_component_router_worker_registered", by="worker_type"),
    ),
    panel(
        "Waiting in the router",
        "short",
        total("dynamo_frontend_router_queue_pending_requests", M, "worker_type"),
    ),
    panel("Router's own time", "ms", p95("dynamo_router_overhead_total_ms")),
    panel("Requests that moved", "short", increase("dynamo_frontend_model_migration_total", M, "model")),
)
DISAGGREGATION = Row(
    "Prefill and decode",
    panel(
        "Requests by worker",
        "reqps",
        rate("dynamo_component_requests_total", GENERATE, "process, dynamo_component"),
    ),
    panel(
        "KV caches that did not come",
        "short",
        increase("dynamo_component_kv_transfers_lost_total", W, "process"),
    ),
    panel(
        "From prefill to decode",
        "s",
        p95("dynamo_component_router_kv_transfer_estimated_latency_seconds"),
        help="As the router estimates it.",
    ),
    panel("NIXL: time of a transfer", "s", p95("vllm:nixl_xfer_time_seconds", W, "process")),
    panel("NIXL: bytes per second", "Bps", rate("vllm:nixl_bytes_transferred_sum", W, "process")),
    panel(
        "NIXL: failed and expired",
        "short",
        increase("vllm:nixl_num_failed_transfers_total", W, "process", "{{process}} failed"),
        increase("vllm:nixl_num_kv_expired_reqs_total", W, "process", "{{process}} not fetched in time"),
    ),
)
TIERS = Row(
    "KV caches in host memory and on disk",
    panel(
        "In use",
        "bytes",
        total("vllm:kv_offload_host_bytes", W, "process", "{{process}} in host memory"),
        total("vllm:kv_offload_disk_bytes", W, "process", "{{process}} on disk"),
        total("dynamo_component_kv_tier_bytes", W, "process, tier", "{{process}} room ({{tier}})"),
    ),
    panel(
        "Prompt tokens found",
        "short",
        rate("vllm:prompt_tokens_cached_by_source_total", W, "source"),
        help="In the engines' own caches (device), in host memory and on disk. From vLLM 0.32 on.",
    ),
    panel(
        "Bytes per second",
        "Bps",
        rate("vllm:kv_offload_load_bytes_total", W, name="host memory to engine"),
        rate("vllm:kv_offload_store_bytes_total", W, name="engine to host memory"),
        rate("vllm:kv_offload_tiering_read_bytes_total", W, name="disk to host memory"),
        rate("vllm:kv_offload_tiering_write_bytes_total", W, name="host memory to disk"),
    ),
)
ADAPTERS = Row(
    "Adapters",
    panel(
        "Adapters loaded",
        "short",
        total("dynamo_component_adapters_loaded", W, "process"),
        total("dynamo_component_adapters_capacity", W, "process", "{{process}} has room for"),
    ),
    panel("Adapters that failed", "short", increase("dynamo_component_adapter_failures_total", W, "process")),
    panel("Requests by model and adapter", "reqps", rate(REQUESTS, M, "model")),
)
MEDIA = Row(
    "Images, video, audio",
    panel(
        "Media per second",
        "short",
        rate("dynamo_frontend_images_per_request_sum", M, name="images"),
        rate("dynamo_frontend_videos_per_request_sum", M, name="videos"),
        rate("dynamo_frontend_audio_per_request_sum", M, name="audio"),
    ),
    panel(
        "Requests no encode worker helped with",
        "short",
        increase("dynamo_component_encodings_lost_total", W, "process"),
    ),
    panel(
        "Media cache hits",
        "percentunit",
        share("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total", W, "process"),
    ),
)
ENGINE = Row(
    "Engine",
    panel("Time in the engine's queue, p95", "s", p95("vllm:request_queue_time_seconds", W, "process")),
    panel("Time of prefill, p95", "s", p95("vllm:request_prefill_time_seconds", W, "process")),
    panel("Time of decode, p95", "s", p95("vllm:request_decode_time_seconds", W, "process")),
    panel("Prompt tokens by source", "short", rate("vllm:prompt_tokens_by_source_total", W, "source")),
    panel("Tokens per step, p95", "short", p95("vllm:iteration_tokens_total", W, "process")),
    panel("Preemptions", "short", increase("vllm:num_preemptions_total", W, "process")),
)
PROCESSES = Row(
    "Processes",
    panel("Workers by state", "short", total("dynamo_component_worker_state", W, "state")),
    panel("Up since", "s", each("dynamo_component_uptime_seconds", "", "process")),
    panel("Room on disks", "bytes", each("dynamo_component_disk_free_bytes", W, "process, folder")),
    panel(
        "Stalls of the frontend", "short", increase("dynamo_frontend_event_loop_stall_total", by="process")
    ),
    panel(
        "From frontend to worker and back, first response",
        "s",
        p95("dynamo_request_plane_roundtrip_ttft_seconds"),
    ),
    panel("Clients that left", "short", increase("dynamo_component_cancellation_total", W, "process")),
)
ROWS = (OVERVIEW, ROUTING, TIERS, DISAGGREGATION, ADAPTERS, MEDIA, ENGINE, PROCESSES)


def expressions() -> Iterator[tuple[str, str]]:
    """Return every panel's title with each of its queries."""
    for row in ROWS:
        for made in row.panels:
            for expression, _ in made.queries:
                yield made.title, expression


def dashboard() -> dict[str, Any]:
    return {
        "uid": "dynamo-vllm",
        "title": "dynamo-vllm",
        "tags": ["dynamo-vllm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(variables())},
        "annotations": {"list": [alerts()]},
        "panels": list(panels()),
    }


def variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, source in (
        ("model", "label_values(dynamo_frontend_requests_total, model)"),
        ("process", 'label_values(up{job="dynamo-vllm-worker"}, process)'),
    ):
        yield {
            "name": name,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": source, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }


def alerts() -> dict[str, Any]:
    """Return annotations that mark on every panel when an alert started to fire."""
    return {
        "name": "Alerts",
        "enable": True,
        "datasource": DATASOURCE,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"DynamoVllm.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{process}} {{model}}",
    }


def panels() -> Iterator[dict[str, Any]]:
    """Lay out the panels from left to right, with a row's title above its panels."""
    numbers = iter(range(1, 1000))
    y = 0
    for row in ROWS:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {"id": next(numbers), "type": "row", "title": row.title, "gridPos": place, "collapsed": False}
        x, y, height = 0, y + 1, 0
        for made in row.panels:
            if x + made.width > COLUMNS:
                x, y = 0, y + height
            height = HEIGHT[made.kind]
            yield shown(made, next(numbers), {"x": x, "y": y, "w": made.width, "h": height})
            x += made.width
        y += height


def shown(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"showLegend": len(panel.queries) > 1 or bool(panel.queries[0][1])}}
        if panel.kind == "timeseries"
        else {"reduceOptions": {"calcs": ["lastNotNull"]}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is stale")
    if not parser.parse_args().check:
        FILE.write_text(text())
        return 0
    if FILE.exists() and FILE.read_text() == text():
        return 0
    print(f"{FILE} is stale; run: python scripts/dashboard.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
