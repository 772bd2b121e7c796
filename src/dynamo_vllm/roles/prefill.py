"""The prefill role: computes a prompt's KV cache, makes exactly one token, and says where the cache is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dynamo_vllm.codec import chunks
from dynamo_vllm.kv.connectors.base import handover
from dynamo_vllm.roles.aggregated import Aggregated
from dynamo_vllm.roles.base import RoleCard

if TYPE_CHECKING:
    from dynamo_vllm import wire
    from dynamo_vllm.job import EngineFacts, Job, Output
    from dynamo_vllm.kv.connectors.base import Connector
    from dynamo_vllm.wire import Chunk

CARD = RoleCard(
    worker_type="Prefill", needs=(("Decode",),), may_migrate=False, router="kv", endpoint_types=()
)


class Prefill:
    card = CARD

    def __init__(self, facts: EngineFacts, connector: Connector | None) -> None:
        self._requests = Aggregated(facts)
        self._connector = connector
        self._lease_seconds = facts.kv_lease_seconds

    def parse(self, raw: object) -> wire.GenerateRequest:
        return self._requests.parse(raw)

    async def prepare(self, request: wire.GenerateRequest, job_id: str) -> Job:
        """One token, whatever the request asks for: the decode worker makes the answer, the first too."""
        job = await self._requests.prepare(request, job_id)
        one = dataclasses.replace(
            job.sampling,
            max_tokens=1,
            min_tokens=1,
            n=1,
            guide=None,
            logprobs=None,
            prompt_logprobs=None,
            max_thinking_tokens=None,
        )
        # A health check hands nothing over: its blocks would be kept for nobody.
        hands_over = self._connector is not None and not request.is_health_check
        params = self._connector.prefill_params() if hands_over and self._connector else None
        return dataclasses.replace(job, sampling=one, transfer=params)

    def encoder(self, request: wire.GenerateRequest, job: Job) -> PrefillEncoder:
        return PrefillEncoder(len(job.prompt), self._lease_seconds)

    def health_check(self) -> dict[str, object]:
        return self._requests.health_check()


class PrefillEncoder:
    """The last chunk carries the hand-over; the frontend gives it to a decode worker as it is."""

    def __init__(self, prompt_tokens: int, lease_seconds: float) -> None:
        self._tokens = chunks.TokenEncoder(prompt_tokens)
        self._lease_seconds = lease_seconds

    def encode(self, output: Output) -> Chunk:
        chunk = self._tokens.encode(output)
        if output.finished:
            chunk["disaggregated_params"] = handover(output.transfer, self._lease_seconds)
        return chunk
