"""From a request to a PictureSpec, refusing what a pipeline cannot draw, with the field's name."""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.codec.sampling import rounded
from dynamo_vllm.errors import InvalidRequest, TooLong
from dynamo_vllm.job import PictureSpec
from dynamo_vllm.wire_openai import ImageSettings, image_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.job import PictureLimits
    from dynamo_vllm.wire_openai import ChatBody, ImageBody

FORMATS = ("png", "jpeg", "webp")
DELIVERIES = ("b64_json", "url")
MAX_PROMPT_CHARACTERS = 32_000
MAX_GUIDANCE = 1000.0
_SIZE = re.compile(r"(\d{1,9})x(\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What this worker draws at most."""

    max_side: int
    max_steps: int
    max_pictures: int


@dataclass(frozen=True, slots=True)
class Checker:
    """Turns bodies into specs that the pipeline can draw."""

    limits: PictureLimits
    bounds: Bounds
    count_tokens: Callable[[str], int]

    def from_image(self, body: ImageBody) -> PictureSpec:
        """nvext wins over the same field beside it, as it is the documented place."""
        if body.input_reference is not None:
            raise InvalidRequest("this worker takes text only", parameter="input_reference")
        if body.background == "transparent":
            raise InvalidRequest("pictures of this model are opaque", parameter="background")
        if (body.response_format or DELIVERIES[0]) not in DELIVERIES:
            raise InvalidRequest(
                f"{body.response_format!r} is unknown; use {' or '.join(DELIVERIES)}",
                parameter="response_format",
            )
        nvext = body.nvext or ImageSettings()
        beside = body.extra_args.media_passthrough if body.extra_args else ImageSettings()
        return self._spec(
            prompt=body.prompt,
            n=body.n,
            size=body.size,
            seed=_first(nvext.seed, beside.seed),
            steps=_first(nvext.num_inference_steps, beside.num_inference_steps),
            guidance=_first(nvext.guidance_scale, beside.guidance_scale),
            negative=_first(nvext.negative_prompt, beside.negative_prompt),
            format=body.output_format,
        )

    def from_chat(self, body: ChatBody) -> PictureSpec:
        """The last message of the user is the prompt; the frontend leaves mm_processor_kwargs as they are."""
        settings = image_settings(body.mm_processor_kwargs, "mm_processor_kwargs")
        return self._spec(
            prompt=last_words(body.messages),
            n=body.n,
            size=settings.size,
            seed=_first(body.seed, settings.seed),
            steps=settings.num_inference_steps,
            guidance=settings.guidance_scale,
            negative=settings.negative_prompt,
            format=None,
        )

    def _spec(
        self,
        *,
        prompt: str,
        n: int | None,
        size: str | None,
        seed: int | None,
        steps: int | None,
        guidance: float | None,
        negative: str | None,
        format: str | None,
    ) -> PictureSpec:
        self._check_text("prompt", prompt)
        if not prompt.strip():
            raise InvalidRequest("the prompt is empty", parameter="prompt")
        if negative is not None:
            self._check_text("negative_prompt", negative)
        _within("n", n, 1, self.bounds.max_pictures)
        most = min(self.bounds.max_steps, self.limits.max_steps or self.bounds.max_steps)
        _within("num_inference_steps", steps, 1, most)
        _within("seed", seed, 0, 2**63 - 1)
        _within("guidance_scale", guidance, 0, MAX_GUIDANCE)
        if (format or FORMATS[0]) not in FORMATS:
            raise InvalidRequest(
                f"{format!r} is unknown; use {', '.join(FORMATS)}", parameter="output_format"
            )
        width, height = self._sides(size)
        return PictureSpec(
            prompt=prompt,
            # vLLM-Omni 0.30: without a seed its diffusers adapter draws the same picture every time.
            seed=secrets.randbelow(2**32) if seed is None else seed,
            n=1 if n is None else n,
            width=width,
            height=height,
            steps=steps,
            guidance=rounded(guidance),
            negative_prompt=negative,
            format=format or FORMATS[0],
        )

    def _check_text(self, field: str, text: str) -> None:
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise TooLong(
                f"{len(text)} characters; this worker takes {MAX_PROMPT_CHARACTERS}", parameter=field
            )
        most = self.limits.max_prompt_tokens
        if most is not None and (count := self.count_tokens(text)) > most:
            # vLLM-Omni would leave the end out without a word.
            raise TooLong(f"{count} tokens; this model takes {most}", parameter=field)

    def _sides(self, size: str | None) -> tuple[int | None, int | None]:
        if size is None or size == "auto":
            return None, None
        found = _SIZE.fullmatch(size)
        if found is None:
            raise InvalidRequest(f"{size!r} is no size; write WIDTHxHEIGHT, as in 512x512", parameter="size")
        width, height = int(found[1]), int(found[2])
        step, most = self.limits.step, self.bounds.max_side
        for side in (width, height):
            if not step <= side <= most or side % step:
                raise InvalidRequest(
                    f"{size}: sides must be multiples of {step} from {step} to {most}", parameter="size"
                )
        return width, height


def last_words(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the user's last message."""
    said = next((m for m in reversed(messages) if m.get("role") == "user"), None)
    if said is None:
        raise InvalidRequest("there is no message of a user to draw", parameter="messages")
    content = said.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
        raise InvalidRequest("this worker takes text only", parameter="messages")
    return " ".join(str(part.get("text", "")) for part in parts)


def _first(chosen: Any, other: Any) -> Any:
    return other if chosen is None else chosen


def _within(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{field}: {value} is not between {low:g} and {high:g}", parameter=field)
