"""Tests the figures of tiers, which are read from vLLM's series, with and without those of vLLM 0.32."""

from __future__ import annotations

from collections.abc import AsyncGenerator
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


@pytest.mark.parametrize("paused", [0.0, 1.0])
def test_paused_disk_is_told(monkeypatch: pytest.MonkeyPatch, paused: float) -> None:
    counted = {("vllm:kv_offload_disk_paused", ""): paused}
    monkeypatch.setattr(prometheus, "totals", lambda names, label: counted)
    assert [(one.tier, one.is_paused) for one in part(DISK).figures()] == [
        ("host", False),
        ("disk", paused > 0),
    ]


class Answers:
    """An AsyncLLM that has these answers; at first two from its own cache, and one in two from its tiers."""

    def __init__(self, own: list[int], from_tiers: list[int], loads: int = 9) -> None:
        self._own, self._from_tiers, self._loads = iter(own), iter(from_tiers), loads
        self._asked = 0

    async def generate(self, prompt: Any, params: Any, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        asks_tiers = bool((params.extra_args or {}).get("kv_transfer_params"))
        assert params.skip_reading_prefix_cache == (self._asked >= 2)
        assert asks_tiers == (self._asked >= 2 and self._asked % 2 == 0)
        self._asked += 1
        answer, cached = next(self._from_tiers if asks_tiers else self._own), 32
        if asks_tiers:
            self._loads -= 1
            cached = 32 if self._loads >= 0 else 0
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[answer])], num_cached_tokens=cached)


async def proof_of(answers: Any) -> tuple[int, bool]:
    facts: Any = SimpleNamespace(
        context_length=100, vocab_size=400, block_size=32, data_parallel_start_rank=0
    )
    proof = await tiers.VllmTiers(answers, facts, {"host": 1000}).prove(0)
    return proof.tier_tokens, proof.is_same


@pytest.mark.parametrize(
    ("own", "from_tiers", "is_same"),
    [
        ([1, 1], [1], True),
        ([1, 2], [2], True),
        ([1, 1, 1], [2, 1], True),
        ([1, 1, 2], [2, 2], True),
        ([1] * 9, [2] * 9, False),
    ],
    ids=["equal", "as again", "other once", "own differs too", "always other"],
)
async def test_another_answer_counts_if_it_stays_another(
    own: list[int], from_tiers: list[int], is_same: bool
) -> None:
    assert await proof_of(Answers(own, from_tiers)) == (32, is_same)


async def test_answer_that_was_computed_proves_no_tier() -> None:
    assert not (await proof_of(Answers([1, 1, 1], [2, 1], loads=1)))[1]
