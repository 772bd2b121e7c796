"""The prefill role: computes a prompt's KV cache, generates exactly one token, and says where the
cache is.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from dynamo_vllm.codec import chunks
from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.job import Output
from dynamo_vllm.kv.connectors.base import LEFT_TO_DECODE, handover, must_be_computed_by_decode
from dynamo_vllm.roles.aggregated import Aggregated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm import wire
    from dynamo_vllm.engine.base import EmbedsReader
    from dynamo_vllm.job import Adapter, EngineFacts, Job
    from dynamo_vllm.kv.connectors.base import Connector
    from dynamo_vllm.roles.media import Reader
    from dynamo_vllm.roles.trials import TrialInputs, Trials
    from dynamo_vllm.wire import Chunk

logger = logging.getLogger(__name__)
# It names no router: one in the card would replace the frontend's with all its settings.
CARD = CARDS["prefill"]


class Prefill:
    card = CARD

    def __init__(
        self,
        facts: EngineFacts,
        connector: Connector | None,
        local_prefill_tokens: int = 0,
        embeds: EmbedsReader | None = None,
        media_reader: Reader | None = None,
    ) -> None:
        self._requests = Aggregated(facts, embeds, media_reader)
        self._connector = connector
        self._lease_seconds = facts.kv_lease_seconds
        self._local_prefill_tokens = local_prefill_tokens

    def parse(self, raw: object) -> wire.GenerateRequest:
        return self._requests.parse(raw)

    def adapter(self, request: wire.GenerateRequest) -> str | None:
        return self._requests.adapter(request)

    async def prepare(
        self, request: wire.GenerateRequest, job_id: str, adapter: Adapter | None = None
    ) -> Job:
        """One token, whatever the request wants: the decode worker generates the answer, including the first
        token."""
        job = await self._requests.prepare(request, job_id, adapter)
        # A health check transfers nothing: its blocks would be kept for nobody.
        hands_over = self._connector is not None and not request.is_health_check
        params = self._connector.prefill_params() if hands_over and self._connector else None
        if self._is_left_to_decode(request, job, params):
            nothing = Output(job.prompt[-1:], finish="length", finished=True)
            return dataclasses.replace(job, answer=nothing)
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
        return dataclasses.replace(job, sampling=one, transfer=params)

    def _is_left_to_decode(
        self, request: wire.GenerateRequest, job: Job, params: Mapping[str, object] | None
    ) -> bool:
        name = self.adapter(request)
        if name and job.adapter is None:
            # The frontend sends the prompts of every adapter here, whichever are loaded.
            logger.warning("request %s: left to decode, adapter %s is not loaded here", job.id, name)
            return True
        if params is not None and must_be_computed_by_decode(job.sampling):
            return True  # the KV cache would be kept for its whole lease
        return len(job.prompt) < self._local_prefill_tokens and not request.is_health_check

    def encoder(self, request: wire.GenerateRequest, job: Job) -> PrefillEncoder:
        return PrefillEncoder(job, self._lease_seconds)

    def health_check(self) -> dict[str, object]:
        return self._requests.health_check()

    def trials(self, given: TrialInputs) -> Trials:
        return self._requests.trials(given)


class PrefillEncoder:
    """The last chunk carries the transfer parameters; the frontend passes them to a decode worker
    unchanged.
    """

    def __init__(self, job: Job, lease_seconds: float) -> None:
        self._tokens = chunks.TokenEncoder(len(job.prompt))
        self._is_left_to_decode = job.answer is not None
        self._lease_seconds = lease_seconds
        self._adapter = job.adapter

    def encode(self, output: Output) -> Chunk:
        chunk = self._tokens.encode(output)
        if self._is_left_to_decode:
            chunk["disaggregated_params"] = LEFT_TO_DECODE
        elif output.finished:
            chunk["disaggregated_params"] = handover(
                output.transfer, self._lease_seconds, self._adapter, output.cached_tokens
            )
        return chunk
