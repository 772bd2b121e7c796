"""The decode role: continues from a KV cache of a prefill worker, or computes it if there is none."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.kv.connectors.base import (
    LEFT_TO_DECODE,
    Rejected,
    must_be_computed_by_decode,
    prefill_cached_tokens,
    refuse_other_adapter,
)
from dynamo_vllm.roles.aggregated import Aggregated

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm import wire
    from dynamo_vllm.codec.chunks import TokenEncoder
    from dynamo_vllm.engine.base import EmbedsReader
    from dynamo_vllm.job import Adapter, EngineFacts, Job, Output
    from dynamo_vllm.kv.connectors.base import Connector
    from dynamo_vllm.roles.media import Reader
    from dynamo_vllm.roles.trials import TrialInputs, Trials
    from dynamo_vllm.wire import Chunk

logger = logging.getLogger(__name__)
# It "needs" its own kind: ready without a prefill worker, which the frontend uses as soon as there is one.
CARD = CARDS["decode"]


class Decode:
    card = CARD

    def __init__(
        self,
        facts: EngineFacts,
        connector: Connector | None,
        on_lost: Callable[[], None],
        embeds: EmbedsReader | None = None,
        media_reader: Reader | None = None,
    ) -> None:
        self._requests = Aggregated(facts, embeds, media_reader)
        self._block_size = facts.block_size
        self._connector = connector
        self._on_lost = on_lost

    def parse(self, raw: object) -> wire.GenerateRequest:
        return self._requests.parse(raw)

    def adapter(self, request: wire.GenerateRequest) -> str | None:
        return self._requests.adapter(request)

    async def prepare(
        self, request: wire.GenerateRequest, job_id: str, adapter: Adapter | None = None
    ) -> Job:
        job = await self._requests.prepare(request, job_id, adapter)
        if request.prefill_result is None or self._connector is None:
            return job
        handoff = request.prefill_result.disaggregated_params
        if handoff == LEFT_TO_DECODE:
            return job
        if must_be_computed_by_decode(job.sampling):
            return job
        try:
            refuse_other_adapter(handoff, adapter)
            params = self._connector.decode_params(handoff, len(job.prompt), self._block_size)
        except Rejected as exc:
            self._lost(job_id, str(exc))
            return job
        return dataclasses.replace(job, transfer=params)

    def _lost(self, job_id: str, reason: str) -> None:
        logger.warning("request %s: the KV cache transfer failed, computing it here: %s", job_id, reason)
        self._on_lost()

    def encoder(self, request: wire.GenerateRequest, job: Job) -> DecodeEncoder | TokenEncoder:
        tokens = self._requests.encoder(request, job)
        if job.transfer is None or request.prefill_result is None:
            return tokens
        cached = prefill_cached_tokens(request.prefill_result.disaggregated_params)
        return DecodeEncoder(tokens, job, cached, self._lost)

    def health_check(self) -> dict[str, object]:
        return self._requests.health_check()

    def trials(self, given: TrialInputs) -> Trials:
        return self._requests.trials(given)


class DecodeEncoder:
    """Check at the end whether the KV cache really came; the engine counts fetched tokens as cached.

    The usage has what the prefill worker found in its own cache; `engine_data` has how many tokens
    the decode engine did not compute: those it fetched, and those in its own cache.
    """

    def __init__(
        self, tokens: TokenEncoder, job: Job, prefill_cached: int, on_lost: Callable[[str, str], None]
    ) -> None:
        self._tokens = tokens
        self._job = job
        self._prefill_cached = prefill_cached
        self._on_lost = on_lost

    def encode(self, output: Output) -> Chunk:
        if not output.finished or output.cached_tokens is None:
            return self._tokens.encode(output)
        came = output.cached_tokens
        wanted = min(int((self._job.transfer or {}).get("remote_num_tokens") or 0), len(self._job.prompt) - 1)
        if came < wanted:
            self._on_lost(self._job.id, f"{came} of {wanted} tokens arrived")
        else:
            output.cached_tokens = self._prefill_cached
        return self._tokens.encode(output) | {"engine_data": {"decode_cached_tokens": came}}
