"""Between our jobs and vLLM-Omni's types."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import EngineRequestFailed
from dynamo_vllm.job import MediaFile, Output, PictureSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_RATE = 24_000
"""Samples per second of a sound whose pipeline does not say."""


def prompt(spec: PictureSpec) -> dict[str, Any]:
    made: dict[str, Any] = {"prompt": spec.prompt}
    if spec.negative_prompt is not None:
        made["negative_prompt"] = spec.negative_prompt
    return made


def stage_params(spec: PictureSpec, defaults: Sequence[Any]) -> list[Any]:
    """One entry per stage: the spec for those that draw; the others answer at once, with the same seed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    made = []
    for default in defaults:
        params = default.clone()
        if isinstance(params, OmniDiffusionSamplingParams):
            _set_picture(params, spec)
        elif isinstance(params, SamplingParams):
            params.output_kind, params.seed = RequestOutputKind.FINAL_ONLY, spec.seed
        made.append(params)
    return made


def _set_picture(params: Any, spec: PictureSpec) -> None:
    params.seed, params.num_outputs_per_prompt = spec.seed, spec.n
    if spec.width is not None:
        params.width, params.height = spec.width, spec.height
    if spec.steps is not None:
        params.num_inference_steps = spec.steps
    if spec.guidance is not None:
        # Pipelines read one or the other: guidance by a second pass, or a number the model was trained with.
        params.guidance_scale = params.true_cfg_scale = spec.guidance
        params.guidance_scale_provided = True


def media_of(result: Any, format: str) -> list[MediaFile]:
    """What a stage made besides text; encoding takes a while, so not on the event loop."""
    made = [picture(image, format) for image in result.images or ()]
    more = result.multimodal_output or {}
    if more.get("audio") is not None:
        made.append(sound(more["audio"], more.get("sr")))
    return made


def picture(image: Any, format: str) -> MediaFile:
    file = io.BytesIO()
    if format == "jpeg" and image.mode not in ("RGB", "L"):
        image = image.convert("RGB")  # JPEG knows no transparency
    image.save(file, format=format.upper())
    return MediaFile("image", f"image/{format}", file.getvalue())


def sound(samples: Any, rate: Any) -> MediaFile:
    """A WAV file of 16 bits from samples between -1 and 1."""
    import torch

    pieces = samples if isinstance(samples, list | tuple) else [samples]
    whole = torch.cat([torch.as_tensor(piece).detach().float().cpu().flatten() for piece in pieces])
    numbers = (whole.clamp(-1, 1) * 32767).to(torch.int16).numpy().astype("<i2")
    hertz = int(torch.as_tensor(rate).flatten()[0]) if rate is not None else DEFAULT_RATE
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(hertz)
        out.writeframes(numbers.tobytes())
    return MediaFile("audio", "audio/wav", file.getvalue())


def text_of(result: Any) -> Output | None:
    """The text of a stage that is not the last."""
    said = "".join(choice.text or "" for choice in result.outputs)
    tokens = [token for choice in result.outputs for token in choice.token_ids]
    return Output(tokens, text=said) if said or tokens else None


def refuse_failed(result: Any) -> None:
    """vLLM-Omni ends some requests with an error inside a finished output."""
    if result.error:
        raise EngineRequestFailed(str(result.error))


def is_aborted(result: Any) -> bool:
    return any(choice.finish_reason == "abort" for choice in result.outputs)
