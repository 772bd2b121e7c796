"""The roles of a pipeline of vLLM-Omni: text as ever under a card of its own, and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm import wire_openai
from dynamo_vllm.codec import openai_media
from dynamo_vllm.codec.pictures import Bounds, Checker
from dynamo_vllm.job import Adapter, EngineFacts, Job, PictureLimits, SamplingSpec
from dynamo_vllm.roles.base import RoleCard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A pipeline publishes no KV events, and the router would wait for them.
TEXT_CARD = RoleCard(worker_type="Aggregated", publishes_kv_events=False, router="round-robin")
PICTURE_CARD = RoleCard(
    worker_type="Aggregated",
    input="Text",
    publishes_kv_events=False,
    may_migrate=False,
    router="round-robin",
    endpoint_types=("chat", "images"),
)
CANARY_STEPS = 8
"""Sides of the smallest picture, in the pipeline's own steps; some draw nothing smaller."""

PictureBody = wire_openai.ChatBody | wire_openai.ImageBody


class Pictures:
    """Text in, pictures out."""

    card = PICTURE_CARD

    def __init__(
        self, facts: EngineFacts, names: Sequence[str], bounds: Bounds, count_tokens: Callable[[str], int]
    ) -> None:
        self._limits = facts.pictures or PictureLimits(step=8)
        self._checker = Checker(self._limits, bounds, count_tokens)
        self._count_tokens = count_tokens
        self._names = names
        self._side = min(
            self._limits.step * CANARY_STEPS, bounds.max_side // self._limits.step * self._limits.step
        )

    def parse(self, raw: object) -> PictureBody:
        return wire_openai.parse_image(raw)

    def adapter(self, request: PictureBody) -> str | None:
        return None

    async def prepare(self, request: PictureBody, job_id: str, adapter: Adapter | None = None) -> Job:
        if isinstance(request, wire_openai.ChatBody):
            spec = self._checker.from_chat(request)
        else:
            spec = self._checker.from_image(request)
        return Job(job_id, (), SamplingSpec(max_tokens=1), picture=spec)

    def encoder(
        self, request: PictureBody, job: Job
    ) -> openai_media.ImagesEncoder | openai_media.MediaChatEncoder:
        spec = job.picture
        assert spec is not None  # `prepare` made it
        if isinstance(request, wire_openai.ChatBody):
            model = request.model or self._names[0]
            return openai_media.MediaChatEncoder(job.id, model, self._count_tokens(spec.prompt))
        size = f"{spec.width}x{spec.height}" if spec.width else None
        return openai_media.ImagesEncoder(request.response_format == "url", size, spec.format)

    def health_check(self) -> dict[str, object]:
        return {
            "prompt": "a",
            "size": f"{self._side}x{self._side}",
            "nvext": {"num_inference_steps": 1, "seed": 0},
            "_HEALTH_CHECK": True,
        }
