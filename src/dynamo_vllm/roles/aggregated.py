"""The aggregated role: the whole request in one engine, tokens in and tokens out."""

from __future__ import annotations

from dynamo_vllm import wire
from dynamo_vllm.codec import chunks, prompt, sampling
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import EngineFacts, Job
from dynamo_vllm.roles.base import RoleCard

CARD = RoleCard(worker_type="Aggregated")


class Aggregated:
    card = CARD

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts

    def parse(self, raw: object) -> wire.GenerateRequest:
        return wire.parse(raw)

    async def prepare(self, request: wire.GenerateRequest, job_id: str) -> Job:
        refuse_unavailable(request)
        ids = request.token_ids
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
        )

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
        return chunks.TokenEncoder(wire.prompt_length(request))

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
    if request.prompt_embeds is not None:
        raise InvalidRequest(
            "this worker was started without --enable-prompt-embeds", parameter="prompt_embeds"
        )
    if request.routing is not None and request.routing.lora_name:
        raise InvalidRequest(f"there is no adapter {request.routing.lora_name!r}", parameter="model")
