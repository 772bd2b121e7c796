"""Tests that vLLM has the series and labels that our alert rules and dashboard use."""

from __future__ import annotations

from pathlib import Path

import dashboard
import pytest
import yaml
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_vllm.models.tiny import make_tiny_model
from harness.prometheus import labels_named, selected

RULES = Path(__file__).parents[2] / "deploy" / "observability" / "prometheus" / "rules.yaml"
OF_TARGETS = {"process", "job", "instance", "le"}
"""The labels that Prometheus adds; `le` is that of histograms."""


def expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    asked = [str(rule["expr"]) for group in groups for rule in group["rules"]]
    return asked + [expression for _, expression in dashboard.expressions()]


ASKED = {part.name for text in expressions() for part in selected(text) if part.name.startswith("vllm:")}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Returns the labels of each series that a decode worker with NIXL has from its start, by name."""
    from vllm import ModelRegistry
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    # vLLM would start a process to look at the class, which imports all of vLLM.
    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer", kv_buffer_device="cpu")
    args = AsyncEngineArgs(
        model=str(folder), dtype="float32", block_size=32, kv_transfer_config=transfer, enforce_eager=True
    )
    PrometheusStatLogger(args.create_engine_config())
    try:
        text = generate_latest(REGISTRY).decode()
    finally:
        unregister_vllm_metrics()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_some_are_asked_for() -> None:
    assert len(ASKED) > 5


@pytest.mark.parametrize("name", sorted(ASKED))
def test_series_is_vllms(series: dict[str, set[str]], name: str) -> None:
    assert name in series


def test_labels_are_vllms(series: dict[str, set[str]]) -> None:
    for text in expressions():
        parts = [part for part in selected(text) if part.name.startswith("vllm:")]
        for part in parts:
            assert (labels_named(text) | set(part.matchers)) - OF_TARGETS <= series[part.name], text
