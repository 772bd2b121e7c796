"""Reads the figures of the tiers behind vLLM's KV cache, and proves that they give back what they got."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.base import TierFigures, TierProof
from dynamo_vllm.engine.process import prometheus
from dynamo_vllm.engine.tiers import ONLY_TIERS
from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.errors import WrongState
from dynamo_vllm.job import SamplingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynamo_vllm.engine.vllm.names import Config, Llm
    from dynamo_vllm.job import EngineFacts

HOST, DISK = "host", "disk"
STORE_SECONDS = 10.0
"""How long a tier may take to store a short prompt."""
_PAUSE_SECONDS = 0.1
_BLOCKS, _ANSWER_TOKENS, _MORE_ANSWERS = 4, 8, 4
_USED = {HOST: "vllm:kv_offload_host_bytes", DISK: "vllm:kv_offload_disk_bytes"}
_READ = {HOST: "vllm:kv_offload_load", DISK: "vllm:kv_offload_tiering_read"}
_WRITTEN = {HOST: "vllm:kv_offload_store", DISK: "vllm:kv_offload_tiering_write"}
_MOVED = [f"{way}_{of}_total" for way in (*_READ.values(), *_WRITTEN.values()) for of in ("bytes", "time")]
_PAUSED = {DISK: "vllm:kv_offload_disk_paused"}
_BY_SOURCE, _OF_ALL = "vllm:prompt_tokens_cached_by_source_total", "vllm:external_prefix_cache_hits_total"


def tiers(llm: Llm, facts: EngineFacts) -> VllmTiers | None:
    sizes = {tier: size * facts.data_parallel_size for tier, size in _sizes(llm.vllm_config)}
    return VllmTiers(llm, facts, sizes) if sizes else None


def _sizes(config: Config) -> Iterator[tuple[str, int]]:
    """Yields the tiers of one rank and their bytes."""
    transfer = config.kv_transfer_config
    extra: Mapping[str, Any] = transfer.kv_connector_extra_config if transfer is not None else {}
    parts = [part.get("kv_connector_extra_config", {}) for part in extra.get("connectors", ())]
    for part in (extra, *parts):
        if part.get("spec_name") == "Tiers":
            yield HOST, int(part["cpu_bytes_to_use"])
            for disk in part.get("secondary_tiers", ()):
                yield DISK, int(disk.get("limit_bytes", 0))


class VllmTiers:
    """Asks the running vLLM; its figures are in its Prometheus series."""

    def __init__(self, llm: Llm, facts: EngineFacts, sizes: Mapping[str, int]) -> None:
        self._llm = llm
        self._facts = facts
        self.sizes = sizes

    def figures(self) -> list[TierFigures]:
        counted = prometheus.totals(
            [*_USED.values(), *_MOVED, *_PAUSED.values(), _BY_SOURCE, _OF_ALL], "source"
        )
        return [self._of(tier, counted) for tier in self.sizes]

    def _of(self, tier: str, counted: Mapping[tuple[str, str], float]) -> TierFigures:
        def count(name: str) -> float:
            return counted.get((name, ""), 0.0)

        used = counted.get((_USED[tier], ""))
        return TierFigures(
            tier=tier,
            bytes=self.sizes[tier],
            used_bytes=None if used is None else int(used),
            hit_tokens=self._hits(tier, counted),
            read_bytes=int(count(f"{_READ[tier]}_bytes_total")),
            read_seconds=count(f"{_READ[tier]}_time_total"),
            written_bytes=int(count(f"{_WRITTEN[tier]}_bytes_total")),
            written_seconds=count(f"{_WRITTEN[tier]}_time_total"),
            is_paused=tier in _PAUSED and count(_PAUSED[tier]) > 0,
        )

    def _hits(self, tier: str, counted: Mapping[tuple[str, str], float]) -> int | None:
        """vLLM 0.30 and 0.31 count the hits of all tiers together."""
        if (found := counted.get((_BY_SOURCE, tier))) is not None:
            return int(found)
        return int(counted.get((_OF_ALL, ""), 0.0)) if len(self.sizes) == 1 else None

    async def prove(self, rank: int) -> TierProof:
        """Compares with the answer from the engine's own cache, which computes as much of the prompt.

        Beside other requests a GPU rounds differently from time to time, and of two tokens that are nearly as
        probable another one comes first. So another answer counts only if it stays another one.
        """
        ids = self._prompt()
        cold, _ = await self._answer(ids, rank)
        again, own_tokens = await self._answer(ids, rank)
        own, deadline = [cold, again], time.monotonic() + STORE_SECONDS
        while True:
            found, tier_tokens = await self._answer(ids, rank, skips_own=True, only_tiers=True)
            if tier_tokens >= max(own_tokens, 1) or time.monotonic() > deadline:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        for _ in range(_MORE_ANSWERS):
            if found in own:
                break
            own.append((await self._answer(ids, rank, skips_own=True))[0])  # its own cache has the tier's now
            more, more_tokens = await self._answer(ids, rank, skips_own=True, only_tiers=True)
            if more_tokens < tier_tokens:
                break  # they have left the tier: this answer says nothing of them
            found = more
        return TierProof(rank, len(ids), tier_tokens, found in own)

    def _prompt(self) -> list[int]:
        """Returns random ids, which no cache has yet; tokens with a meaning of their own are at the ends."""
        facts = self._facts
        blocks = min(_BLOCKS, (facts.context_length - _ANSWER_TOKENS - 1) // facts.block_size)
        if blocks < 1:
            raise WrongState(f"a context of {facts.context_length} tokens has no room for a block and more")
        quarter = facts.vocab_size // 4
        return random.choices(range(quarter, 2 * quarter), k=blocks * facts.block_size + 1)

    async def _answer(
        self, ids: list[int], rank: int, *, skips_own: bool = False, only_tiers: bool = False
    ) -> tuple[list[int], int]:
        """Returns the answer, and how many tokens of the prompt were not computed.

        What skips the engine's own cache skips the tiers too, unless it asks for them.
        """
        sampling = SamplingSpec(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        params = convert.sampling_params(sampling, {ONLY_TIERS: True} if only_tiers else None)
        params.skip_reading_prefix_cache = skips_own
        stream = self._llm.generate(
            {"type": "token", "prompt_token_ids": ids},
            params,
            f"prove-tiers-{uuid.uuid4().hex}",
            lora_request=None,
            trace_headers=None,
            priority=0,
            data_parallel_rank=rank - self._facts.data_parallel_start_rank,
        )
        answer, cached = list[int](), 0
        try:
            async with contextlib.aclosing(stream):
                async for result in stream:
                    answer += result.outputs[0].token_ids
                    cached = result.num_cached_tokens or 0
        except Exception as exc:
            raise convert.error(exc) from exc
        return answer, cached
