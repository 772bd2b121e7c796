"""Puts media into prompts with vLLM's processors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.transformers_utils.processor import get_video_processor_cls_name

from dynamo_vllm.engine import vllm_video
from dynamo_vllm.errors import EngineRequestFailed, InvalidRequest
from dynamo_vllm.job import Media, MediaPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.engine.base import FrameChooser
    from dynamo_vllm.errors import DynamoVllmError

KINDS = ("image", "video", "audio")
_REASON_LENGTH = 200


def limits(renderer: Any) -> dict[str, int]:
    """How many of each kind the model takes in one prompt, by the user's --limit-mm-per-prompt too."""
    processor = renderer.mm_processor
    if processor is None:
        return {}
    allowed = processor.info.allowed_mm_limits
    return {kind: allowed[kind] for kind in KINDS if allowed.get(kind)}


def frame_chooser(model_config: Any) -> FrameChooser | None:
    return vllm_video.frame_chooser(get_video_processor_cls_name(model_config))


async def see(renderer: Any, prompt: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
    """Every mark in the prompt as many tokens as its medium takes, and the media as tensors beside it."""
    data: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    for medium in media:
        data.setdefault(medium.kind, []).append(medium.data)
        names.setdefault(medium.kind, []).append(medium.name)
    plain = list(prompt)
    given = {"prompt_token_ids": plain, "multi_modal_data": data, "multi_modal_uuids": names}
    try:
        (made,) = await renderer.render_cmpl_async([given])
    except Exception as exc:
        raise refusal(exc, media) from exc
    return MediaPrompt(made["prompt_token_ids"], plain, tuple(media), made)


def refusal(exc: Exception, media: Sequence[Media]) -> DynamoVllmError:
    """Why the media cannot be taken: they were decoded before, so the rest is between model and client.

    vLLM 0.30: the reason of a processor's error is its cause; its own text is a dump of the data.
    """
    kinds = " and ".join(sorted({medium.kind for medium in media}))
    reason = exc.__cause__ or exc
    match exc:
        case VLLMClientError():
            text = str(exc.args[0]) if exc.args else str(exc)
        case RuntimeError() | AssertionError() if "prompt" in str(exc):
            text = f"the prompt has no place for every {kinds}; does the chat template write their marks?"
        case ValueError() if isinstance(reason, ValueError | TypeError | IndexError | ZeroDivisionError):
            why = next(iter(str(reason).splitlines()), type(reason).__name__)
            text = f"the model's processor does not take the {kinds}: {why[:_REASON_LENGTH]}"
        case _:
            return EngineRequestFailed(f"{kinds}: {type(reason).__name__}")
    return InvalidRequest(text, parameter="messages")
