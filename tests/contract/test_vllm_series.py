"""Tests that vLLM has the series and labels that our alert rules and dashboard use."""

from __future__ import annotations

from pathlib import Path

import dashboard
import pytest
import yaml
from prometheus_client import REGISTRY

from dynamo_vllm.engine.patches.patch import installed, is_within
from dynamo_vllm.models.tiny import make_tiny_model
from harness.prometheus import labels_named, selected

RULES = Path(__file__).parents[2] / "deploy" / "observability" / "prometheus" / "rules.yaml"
OF_TARGETS = {"process", "job", "instance", "le"}
"""The labels that Prometheus adds; `le` is that of histograms."""


def expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    asked = [str(rule["expr"]) for group in groups for rule in group["rules"]]
    return asked + [expression for _, expression in dashboard.expressions()]


SINCE_0_32 = {"vllm:prompt_tokens_cached_by_source_total"}
ASKED = {part.name for text in expressions() for part in selected(text) if part.name.startswith("vllm:")}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Returns the labels of each series that a worker with NIXL and tiers may have, by name."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    disk = {"type": "DiskTier", "module_path": "dynamo_vllm.engine.tiers.disk_tier"}
    tiers = {
        "spec_name": "Tiers",
        "spec_module_path": "dynamo_vllm.engine.tiers.spec",
        "secondary_tiers": [disk],
    }
    connectors = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {
            "kv_connector": "TierConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": tiers,
        },
    ]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config={"connectors": connectors},
    )
    args = AsyncEngineArgs(
        model=str(folder), dtype="float32", block_size=32, kv_transfer_config=transfer, enforce_eager=True
    )
    PrometheusStatLogger(args.create_engine_config())
    try:  # those of tiers have no samples yet
        known = {metric: tuple(names) for metric, names in REGISTRY._collector_to_names.items()}
    finally:
        unregister_vllm_metrics()
    return {
        name: set(getattr(metric, "_labelnames", ())) for metric, names in known.items() for name in names
    }


def test_series_are_vllms(series: dict[str, set[str]]) -> None:
    known = set(series) if is_within(str(installed("vllm")), ">=0.32") else set(series) | SINCE_0_32
    assert len(ASKED) > 5 and ASKED - known == set()


def test_labels_are_vllms(series: dict[str, set[str]]) -> None:
    for text in expressions():
        parts = [part for part in selected(text) if part.name.startswith("vllm:")]
        for part in parts:
            if part.name in SINCE_0_32 and part.name not in series:
                continue
            assert (labels_named(text) | set(part.matchers)) - OF_TARGETS <= series[part.name], text
