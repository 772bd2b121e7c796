"""Turns a request into a PipelineSpec; refuses what a pipeline cannot generate, with the field's name."""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.codec.sampling import shortest_float
from dynamo_vllm.errors import InvalidRequest, TooLong
from dynamo_vllm.job import PipelineSpec
from dynamo_vllm.wire_openai import ImageSettings, parse_image_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.job import PipelineLimits
    from dynamo_vllm.wire_openai import ChatBody, ImageBody, SpeechBody, VideoBody

FORMATS = {"image": ("png", "jpeg", "webp"), "video": ("mp4",), "audio": ("wav",)}
"""The first of each is the default."""
DELIVERIES = ("b64_json", "url")
MAX_PROMPT_CHARACTERS = 32_000
MAX_GUIDANCE = 1000.0
MAX_FRAMES, MAX_FPS = 1000, 120
FPS = 24
"""For a video whose length is given in seconds but not its rate."""
DEFAULT_PIXELS = {"image": 1024 * 1024, "video": 832 * 480}
"""The assumed size of an image or frame if the request names none: that of today's models."""
_SIZE = re.compile(r"(\d{1,9})x(\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of this worker."""

    max_side: int
    max_steps: int
    max_images: int
    max_megapixels: float
    """Of all images of a request together."""
    max_video_megapixels: float
    """Of all frames together."""


@dataclass(frozen=True, slots=True)
class SpecBuilder:
    """Turns bodies into specs that the pipeline can generate."""

    limits: PipelineLimits
    bounds: Bounds
    count_tokens: Callable[[str], int]

    def from_image(self, body: ImageBody) -> PipelineSpec:
        if body.background == "transparent":
            raise InvalidRequest(
                "this model generates opaque images only; leave it out", parameter="background"
            )
        _check_choice("response_format", body.response_format, DELIVERIES)
        settings = _settings(body)
        return self._spec(body.prompt, settings, n=body.n, size=body.size, format=body.output_format)

    def from_video(self, body: VideoBody) -> PipelineSpec:
        _check_choice("response_format", body.response_format, DELIVERIES)
        settings = _settings(body)
        _check_range("seconds", body.seconds, 1, MAX_FRAMES)
        frames = settings.num_frames
        if frames is None and body.seconds is not None:
            frames = body.seconds * (settings.fps or FPS)
        return self._spec(body.prompt, settings, size=body.size, frames=frames, format=body.output_format)

    def from_speech(self, body: SpeechBody) -> PipelineSpec:
        """Voices are for models that speak; a pipeline that generates audio from a description has none."""
        _check_choice("data_source", body.data_source, DELIVERIES)
        _check_choice("response_format", body.response_format, FORMATS["audio"])
        if body.speed not in (None, 1):
            raise InvalidRequest(f"{body.speed} is not supported; use 1, or leave it out", parameter="speed")
        if body.ref_audio is not None:
            raise InvalidRequest("this worker takes text only; leave it out", parameter="ref_audio")
        extra = body.extra_args.media_passthrough if body.extra_args else ImageSettings()
        return self._spec(body.input, extra, field="input")

    def from_chat(self, body: ChatBody) -> PipelineSpec:
        """The user's last message is the prompt; the frontend passes mm_processor_kwargs unchanged."""
        settings = parse_image_settings(body.mm_processor_kwargs, "mm_processor_kwargs")
        return self._spec(
            last_user_text(body.messages),
            settings,
            n=body.n,
            size=settings.size,
            frames=settings.num_frames,
            seed=body.seed,
        )

    def _spec(
        self,
        prompt: str,
        settings: ImageSettings,
        *,
        field: str = "prompt",
        n: int | None = None,
        size: str | None = None,
        frames: int | None = None,
        seed: int | None = None,
        format: str | None = None,
    ) -> PipelineSpec:
        kind = self.limits.kind
        seed = _first_given(seed, settings.seed)
        self._check_text(field, prompt)
        if not prompt.strip():
            raise InvalidRequest("this is empty; describe what to generate", parameter=field)
        if settings.negative_prompt is not None:
            self._check_text("negative_prompt", settings.negative_prompt)
        _check_range("n", n, 1, self.bounds.max_images if kind == "image" else 1)
        most = min(self.bounds.max_steps, self.limits.max_steps or self.bounds.max_steps)
        _check_range("num_inference_steps", settings.num_inference_steps, 1, most)
        _check_range("seed", seed, 0, 2**63 - 1)
        _check_range("guidance_scale", settings.guidance_scale, 0, MAX_GUIDANCE)
        _check_range("fps", settings.fps, 1, MAX_FPS)
        _check_choice("output_format", format, FORMATS[kind])
        if kind == "video":
            _check_range("num_frames", frames, 1, MAX_FRAMES)
            frames = self.limits.frames if frames is None else frames
        else:
            frames = None
        width, height = self._parse_size(size)
        self._check_pixels(width, height, n or 1, frames)
        return PipelineSpec(
            prompt=prompt,
            # vLLM-Omni 0.30: without a seed its diffusers adapter generates the same image every time.
            seed=secrets.randbelow(2**32) if seed is None else seed,
            kind=kind,
            n=1 if n is None else n,
            width=width,
            height=height,
            frames=frames,
            fps=settings.fps,
            steps=settings.num_inference_steps,
            guidance=shortest_float(settings.guidance_scale),
            negative_prompt=settings.negative_prompt,
            format=format or FORMATS[kind][0],
        )

    def _check_pixels(self, width: int | None, height: int | None, n: int, frames: int | None) -> None:
        """Together they determine a request's memory, however it is split."""
        kind = self.limits.kind
        if kind == "audio":
            return
        one = width * height if width and height else DEFAULT_PIXELS[kind]
        most = self.bounds.max_video_megapixels if frames else self.bounds.max_megapixels
        total = one * n * (frames or 1)
        if total > most * 1e6:
            field, what = ("num_frames", f"{frames} frames") if frames else ("n", f"{n} images")
            raise InvalidRequest(
                f"{field}: {what} of {one} pixels have {total / 1e6:.1f} million pixels; this worker "
                f"generates at most {most:g} million per request. Request fewer or smaller ones",
                parameter=field,
            )

    def _check_text(self, field: str, text: str) -> None:
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise TooLong(
                f"{len(text)} characters; this worker takes at most {MAX_PROMPT_CHARACTERS}", parameter=field
            )
        most = self.limits.max_prompt_tokens
        if most is not None and (count := self.count_tokens(text)) > most:
            # vLLM-Omni would silently truncate it.
            raise TooLong(f"{count} tokens; this model takes at most {most}", parameter=field)

    def _parse_size(self, size: str | None) -> tuple[int | None, int | None]:
        if size is None or size == "auto":
            return None, None
        found = _SIZE.fullmatch(size)
        if found is None:
            raise InvalidRequest(
                f"{size!r} is not a size; write WIDTHxHEIGHT, as in 512x512", parameter="size"
            )
        width, height = int(found[1]), int(found[2])
        step, most = self.limits.step, self.bounds.max_side
        for side in (width, height):
            if not step <= side <= most or side % step:
                raise InvalidRequest(
                    f"{size}: sides must be multiples of {step} from {step} to {most}", parameter="size"
                )
        return width, height


def _settings(body: ImageBody | VideoBody) -> ImageSettings:
    """nvext wins over the same top-level field, as it is the documented place."""
    if body.input_reference is not None:
        raise InvalidRequest("this worker takes text only; leave it out", parameter="input_reference")
    nvext = body.nvext or ImageSettings()
    extra = body.extra_args.media_passthrough if body.extra_args else ImageSettings()
    found = {
        name: _first_given(getattr(nvext, name), getattr(extra, name))
        for name in ImageSettings.__struct_fields__
    }
    return ImageSettings(**found)


def last_user_text(messages: Sequence[Mapping[str, object]]) -> str:
    """Return the text of the user's last message."""
    message = next((m for m in reversed(messages) if m.get("role") == "user"), None)
    if message is None:
        raise InvalidRequest("there is no user message to generate from", parameter="messages")
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
        raise InvalidRequest("this worker takes text only", parameter="messages")
    return " ".join(str(part.get("text", "")) for part in parts)


def _first_given(chosen: Any, other: Any) -> Any:
    return other if chosen is None else chosen


def _check_choice(field: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise InvalidRequest(f"{value!r} is unknown; use {' or '.join(known)}", parameter=field)


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{field}: {value} is not between {low:g} and {high:g}", parameter=field)
