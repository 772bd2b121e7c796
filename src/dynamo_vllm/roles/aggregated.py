"""The aggregated role: the whole request in one engine, tokens in and tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm import wire
from dynamo_vllm.codec import chunks, prompt, sampling
from dynamo_vllm.config.role_cards import CARDS, RoleCard
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import Adapter, Embeds, EngineFacts, Job, MediaPrompt
from dynamo_vllm.roles import media, trials

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.engine.base import EmbedsReader

CARD = CARDS["agg"]


class Aggregated:
    def __init__(
        self,
        facts: EngineFacts,
        embeds: EmbedsReader | None = None,
        media_reader: media.Reader | None = None,
        card: RoleCard = CARD,
    ) -> None:
        self.card = card
        self._facts = facts
        self._embeds_reader = embeds
        self._media: media.Reader = media_reader or media.MediaReader(facts)

    def parse(self, raw: object) -> wire.GenerateRequest:
        return wire.parse(raw)

    def adapter(self, request: wire.GenerateRequest) -> str | None:
        return request.routing.lora_name if request.routing is not None else None

    async def prepare(
        self, request: wire.GenerateRequest, job_id: str, adapter: Adapter | None = None
    ) -> Job:
        routing = request.routing or wire.Routing()
        embeds = await self._embeds(request)
        ids: Sequence[int] = request.token_ids if embeds is None else [0] * embeds.rows + request.token_ids
        media.refuse_dropped_audio(ids, self._facts)
        prompt.check_ids(ids, self._facts.vocab_size)
        media_prompt = await self._with_media(request, ids, job_id)
        ids = ids if media_prompt is None else media_prompt.tokens
        room = prompt.room_after(ids, self._facts.context_length)
        return Job(
            job_id,
            ids,
            sampling.from_tokens(request, room, self._facts),
            priority=-(routing.priority or 0),
            data_parallel_rank=self._rank(routing.dp_rank),
            cache_salt=routing.cache_salt,
            adapter=adapter,
            embeds=embeds,
            media=media_prompt,
        )

    async def _with_media(
        self, request: wire.GenerateRequest, ids: Sequence[int], job_id: str
    ) -> MediaPrompt | None:
        """Return the prompt with its media, if it has any."""
        refs = media.of_tokens(request)
        if not refs:
            return None
        if request.prompt_embeds is not None:
            raise InvalidRequest("cannot be combined with media; give one of them", parameter="prompt_embeds")
        # Before anything is fetched: media only make it longer.
        prompt.room_after(ids, self._facts.context_length)
        routing = request.routing or wire.Routing()
        return await self._media.read(ids, refs, routing.cache_salt, media.routing_names(request), job_id)

    async def _embeds(self, request: wire.GenerateRequest) -> Embeds | None:
        """Return the prompt as embeddings; token ids with it are the answer so far of a worker that left."""
        text = request.prompt_embeds
        if text is None:
            return None
        if self._embeds_reader is None:
            raise InvalidRequest(
                "this worker was started without --enable-prompt-embeds", parameter="prompt_embeds"
            )
        if request.token_ids and not wire.has_moved(request):
            raise InvalidRequest(
                "cannot be combined with prompt_embeds; give one of them", parameter="token_ids"
            )
        if request.output_options.prompt_logprobs is not None:
            raise InvalidRequest(
                "not available with prompt_embeds; leave it out", parameter="prompt_logprobs"
            )
        return await self._embeds_reader.read(text)

    def _rank(self, rank: int | None) -> int | None:
        """Return the rank that the router chose; a worker with one rank needs none."""
        if rank is None:
            return None
        first = self._facts.data_parallel_start_rank
        if not first <= rank < first + self._facts.data_parallel_size:
            last = first + self._facts.data_parallel_size - 1
            raise InvalidRequest(f"{rank} is unknown; this worker has {first} to {last}", parameter="dp_rank")
        return rank if self._facts.data_parallel_size > 1 else None

    def encoder(self, request: wire.GenerateRequest, job: Job) -> chunks.TokenEncoder:
        return chunks.TokenEncoder(wire.prompt_length(request, len(job.prompt)))

    def health_check(self) -> dict[str, object]:
        token = self._facts.bos_token_id
        return {
            "token_ids": [token if token is not None else 1],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
            "output_options": {},
            "_HEALTH_CHECK": True,
        }

    def trials(self, given: trials.TrialInputs) -> trials.Trials:
        return trials.of_tokens(self._facts, given)
