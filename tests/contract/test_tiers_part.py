"""Tests the figures of tiers, which are read from vLLM's series, with and without those of vLLM 0.32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_vllm.engine.process import prometheus
from dynamo_vllm.engine.vllm.parts import tiers

OFFLOAD = {"spec_name": "Tiers", "cpu_bytes_to_use": 1000}
DISK = {**OFFLOAD, "secondary_tiers": [{"type": "DiskTier", "limit_bytes": 9000}]}
SOURCES = {("vllm:prompt_tokens_cached_by_source_total", tier): 32.0 for tier in ("host", "disk")}


def part(extra: dict[str, Any] | None, ranks: int = 1) -> Any:
    transfer = None if extra is None else SimpleNamespace(kv_connector_extra_config=extra)
    llm: Any = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))
    facts: Any = SimpleNamespace(data_parallel_size=ranks)
    return tiers.tiers(llm, facts)


def test_sizes_are_those_of_all_ranks_also_beside_nixl() -> None:
    assert part(DISK, 2).sizes == {"host": 2000, "disk": 18000}
    assert part({"connectors": [{"kv_connector_extra_config": OFFLOAD}, {}]}).sizes == {"host": 1000}
    assert part(None) is part({}) is None


@pytest.mark.parametrize(
    ("extra", "counted", "hits"),
    [
        (DISK, SOURCES, [32, 32]),
        (OFFLOAD, {("vllm:external_prefix_cache_hits_total", ""): 64.0}, [64]),
        (DISK, {("vllm:external_prefix_cache_hits_total", ""): 64.0}, [None, None]),
    ],
    ids=["vLLM 0.32", "vLLM 0.30, one tier", "vLLM 0.30, two tiers"],
)
def test_hits_are_told_apart_where_vllm_does(
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    counted: dict[tuple[str, str], float],
    hits: list[int],
) -> None:
    monkeypatch.setattr(prometheus, "totals", lambda names, label: counted)
    found = part(extra).figures()
    assert [figures.hit_tokens for figures in found] == hits
    assert [(figures.used_bytes, figures.read_bytes) for figures in found] == [(None, 0)] * len(hits)
