"""The roles of a vLLM-Omni pipeline: text under a separate card, and media."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dynamo_vllm import wire_openai
from dynamo_vllm.codec import openai_media
from dynamo_vllm.codec.pipeline import Bounds, SpecBuilder
from dynamo_vllm.config.role_cards import RoleCard
from dynamo_vllm.job import Adapter, EngineFacts, Job, PipelineLimits, SamplingSpec
from dynamo_vllm.roles.trials import Trial, TrialInputs, Trials
from dynamo_vllm.wire_openai import ChatBody, ImageBody, MediaBody, SpeechBody, VideoBody

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_vllm.roles.base import Encoder

# A pipeline publishes no KV events, and the router would wait for them.
TEXT_CARD = RoleCard(worker_type="Aggregated", publishes_kv_events=False, router="round-robin")
IMAGE_CARD = RoleCard(
    worker_type="Aggregated",
    input="Text",
    publishes_kv_events=False,
    may_migrate=False,
    router="round-robin",
    endpoint_types=("chat", "images"),
)
CARDS = {
    "image": IMAGE_CARD,
    "video": dataclasses.replace(IMAGE_CARD, endpoint_types=("chat", "videos")),
    "audio": dataclasses.replace(IMAGE_CARD, endpoint_types=("chat", "audios")),
}
CANARY_STEPS = 8
"""Sides of the smallest image, in the pipeline's own steps; some generate nothing smaller."""


def count_nothing(_: str) -> int:
    """For a pipeline whose prompts nothing here can count."""
    return 0


class MediaPipeline:
    """Text in; images, videos or audio out."""

    def __init__(
        self, facts: EngineFacts, names: Sequence[str], bounds: Bounds, count_tokens: Callable[[str], int]
    ) -> None:
        self._limits = facts.pipeline or PipelineLimits(step=8)
        self._specs = SpecBuilder(self._limits, bounds, count_tokens)
        self._count_tokens = count_tokens
        self._names = names
        self._side = min(
            self._limits.step * CANARY_STEPS, bounds.max_side // self._limits.step * self._limits.step
        )

    @property
    def card(self) -> RoleCard:
        return CARDS[self._limits.kind]

    def parse(self, raw: object) -> MediaBody:
        return wire_openai.parse_media(raw, self._limits.kind)

    def adapter(self, request: MediaBody) -> str | None:
        return None

    async def prepare(self, request: MediaBody, job_id: str, adapter: Adapter | None = None) -> Job:
        match request:
            case ChatBody():
                spec = self._specs.from_chat(request)
            case ImageBody():
                spec = self._specs.from_image(request)
            case VideoBody():
                spec = self._specs.from_video(request)
            case SpeechBody():
                spec = self._specs.from_speech(request)
        return Job(job_id, (), SamplingSpec(max_tokens=1), pipeline=spec)

    def encoder(self, request: MediaBody, job: Job) -> Encoder:
        spec = job.pipeline
        assert spec is not None  # `prepare` made it
        model = request.model or self._names[0]
        match request:
            case ChatBody():
                return openai_media.MediaChatEncoder(job.id, model, self._count_tokens(spec.prompt))
            case ImageBody():
                size = f"{spec.width}x{spec.height}" if spec.width else None
                return openai_media.ImagesEncoder(request.response_format == "url", size, spec.format)
            case VideoBody():
                wants_url = request.response_format == "url"
            case SpeechBody():
                wants_url = request.data_source == "url"
        return openai_media.FilesEncoder(spec.kind, job.id, model, wants_url, spec.format)

    def health_check(self) -> dict[str, object]:
        smallest = {"num_inference_steps": 1, "seed": 0}
        if self._limits.kind == "audio":
            asked: dict[str, object] = {"input": "a", "extra_args": {"media_passthrough": smallest}}
        else:
            if self._limits.kind == "video":
                smallest["num_frames"] = 1
            asked = {"prompt": "a", "size": f"{self._side}x{self._side}", "nvext": smallest}
        return {**asked, "_HEALTH_CHECK": True}

    def trials(self, given: TrialInputs) -> Trials:
        return Trials(Trial("media", self.health_check()))
