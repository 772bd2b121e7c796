"""The aggregated role: the whole request in one engine, tokens in and tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm import wire
from dynamo_vllm.codec import chunks, prompt, sampling
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import Adapter, Embeds, EngineFacts, Job
from dynamo_vllm.roles.base import RoleCard

if TYPE_CHECKING:
    from dynamo_vllm.engine.base import EmbedsReader

CARD = RoleCard(worker_type="Aggregated")


class Aggregated:
    def __init__(self, facts: EngineFacts, reader: EmbedsReader | None = None, card: RoleCard = CARD) -> None:
        self.card = card
        self._facts = facts
        self._reader = reader if facts.takes_embeds else None

    def parse(self, raw: object) -> wire.GenerateRequest:
        return wire.parse(raw)

    def adapter(self, request: wire.GenerateRequest) -> str | None:
        return request.routing.lora_name if request.routing is not None else None

    async def prepare(
        self, request: wire.GenerateRequest, job_id: str, adapter: Adapter | None = None
    ) -> Job:
        refuse_unavailable(request)
        embeds = await self._embeds(request)
        ids = request.token_ids if embeds is None else [0] * embeds.rows + request.token_ids
        room = prompt.room_behind(ids, self._facts.context_length)
        prompt.check_ids(ids, self._facts.vocab_size)
        routing = request.routing or wire.Routing()
        return Job(
            job_id,
            ids,
            sampling.from_tokens(request, room, self._facts),
            priority=-(routing.priority or 0),
            data_parallel_rank=self._rank(routing.dp_rank),
            cache_salt=routing.cache_salt,
            adapter=adapter,
            embeds=embeds,
        )

    async def _embeds(self, request: wire.GenerateRequest) -> Embeds | None:
        """The prompt as vectors; token ids beside it are an answer begun by a worker that went away."""
        text = request.prompt_embeds
        if text is None:
            return None
        if self._reader is None:
            raise InvalidRequest(
                "this worker was started without --enable-prompt-embeds", parameter="prompt_embeds"
            )
        if request.token_ids and not wire.has_moved(request):
            raise InvalidRequest("cannot stand beside prompt_embeds; give one of them", parameter="token_ids")
        if request.output_options.prompt_logprobs is not None:
            raise InvalidRequest("rows of prompt_embeds have none; leave it out", parameter="prompt_logprobs")
        return await self._reader.read_embeds(text)

    def _rank(self, rank: int | None) -> int | None:
        """The rank the router chose; a worker with one rank needs none."""
        if rank is None:
            return None
        first = self._facts.data_parallel_start_rank
        if not first <= rank < first + self._facts.data_parallel_size:
            last = first + self._facts.data_parallel_size - 1
            raise InvalidRequest(f"{rank} is unknown; this worker has {first} to {last}", parameter="dp_rank")
        return rank if self._facts.data_parallel_size > 1 else None

    def encoder(self, request: wire.GenerateRequest, job: Job) -> chunks.TokenEncoder:
        rows = 0 if job.embeds is None else job.embeds.rows
        return chunks.TokenEncoder(rows + wire.prompt_length(request))

    def health_check(self) -> dict[str, object]:
        token = self._facts.bos_token_id
        return {
            "token_ids": [token if token is not None else 1],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
            "output_options": {},
            "_HEALTH_CHECK": True,
        }


def refuse_unavailable(request: wire.GenerateRequest) -> None:
    """Parts of a request that this worker was not started for."""
    if request.multi_modal_data:
        raise InvalidRequest(
            "this worker takes text only; it was started without --enable-multimodal", parameter="messages"
        )
