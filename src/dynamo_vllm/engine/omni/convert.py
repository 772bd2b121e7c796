"""Converts between our jobs and vLLM-Omni's types."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import EngineRequestFailed
from dynamo_vllm.job import MediaFile, Output, PipelineSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_RATE = 24_000
"""The sample rate of audio if the pipeline does not report one."""
DEFAULT_FPS = 24
"""The frame rate of a video, as the frontend documents it."""


def prompt(spec: PipelineSpec) -> dict[str, Any]:
    """Returns the prompt in the form of AsyncOmni."""
    made: dict[str, Any] = {"prompt": spec.prompt}
    if spec.negative_prompt is not None:
        made["negative_prompt"] = spec.negative_prompt
    return made


def stage_params(spec: PipelineSpec, defaults: Sequence[Any]) -> list[Any]:
    """Returns the parameters of each stage: diffusion stages get the spec, text stages the same seed.

    Text stages return their whole text at once.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    made = []
    for default in defaults:
        params = default.clone()
        if isinstance(params, OmniDiffusionSamplingParams):
            _set_diffusion(params, spec)
        elif isinstance(params, SamplingParams):
            params.output_kind, params.seed = RequestOutputKind.FINAL_ONLY, spec.seed
        made.append(params)
    return made


def _set_diffusion(params: Any, spec: PipelineSpec) -> None:
    params.seed, params.num_outputs_per_prompt = spec.seed, spec.n
    if spec.width is not None:
        params.width, params.height = spec.width, spec.height
    if spec.frames is not None:
        # Always set: the default of vLLM-Omni 0.30 is one frame.
        params.num_frames = spec.frames
    if spec.fps is not None:
        params.fps = spec.fps
    if spec.steps is not None:
        params.num_inference_steps = spec.steps
    if spec.guidance is not None:
        # Pipelines read one or the other: classifier-free guidance, or distilled guidance (an input).
        params.guidance_scale = params.true_cfg_scale = spec.guidance
        params.guidance_scale_provided = True


def media_of(result: Any, spec: PipelineSpec, sample_rate: int | None = None) -> list[MediaFile]:
    """Returns the media that a stage generated, as files; encoding is slow, so not on the event loop."""
    made, more = list(result.images or ()), result.multimodal_output or {}
    samples = more.get("audio")
    rate = _number(more.get("sr"), more.get("audio_sample_rate"), sample_rate, DEFAULT_RATE)
    if spec.kind == "video" and made:
        fps = _number(spec.fps, more.get("fps"), DEFAULT_FPS)
        return [video_file(frames, fps, samples, int(rate)) for frames in videos(made)]
    if spec.kind == "audio" and made:
        return [audio_file(piece, int(rate)) for piece in made]  # the diffusers adapter calls them images
    files = [image_file(image, spec.format) for image in made]
    if samples is not None:
        files.append(audio_file(samples, int(rate)))
    return files


def _number(*found: Any) -> float:
    """Returns the first value that is not None; vLLM-Omni gives numbers or tensors with one value."""
    first = next(value for value in found if value is not None)
    if isinstance(first, list | tuple):
        first = first[0]
    return float(first.flatten()[0]) if hasattr(first, "flatten") else float(first)


def image_file(image: Any, format: str) -> MediaFile:
    if not hasattr(image, "save"):
        raise EngineRequestFailed(f"the pipeline generated {type(image).__name__}, not an image")
    file = io.BytesIO()
    if format == "jpeg" and image.mode not in ("RGB", "L"):
        image = image.convert("RGB")  # JPEG does not support transparency
    image.save(file, format=format.upper())
    return MediaFile("image", f"image/{format}", file.getvalue())


def videos(made: list[object]) -> list[object]:
    """Returns each video as frames of bytes (time, height, width, 3), from images, arrays or tensors."""
    import numpy as np

    if made and hasattr(made[0], "save"):
        made = [made]  # one video, as a plain list of frames
    whole = []
    for item in made:
        if isinstance(item, list | tuple):
            item = [np.asarray(frame.convert("RGB") if hasattr(frame, "save") else frame) for frame in item]
        elif hasattr(item, "detach"):
            item = item.detach().float().cpu().numpy()
        array = np.asarray(item)
        whole += list(array) if array.ndim == 5 else [array]
    return [_frames(array) for array in whole]


def _frames(array: Any) -> Any:
    import numpy as np

    if array.ndim != 4:
        raise EngineRequestFailed(
            f"the pipeline generated an array of shape {array.shape}, which is not a video"
        )
    if array.shape[-1] != 3:
        channels = next((at for at in (0, 1) if array.shape[at] == 3), None)
        if channels is None:
            raise EngineRequestFailed(f"a video of shape {array.shape} does not have three colour channels")
        array = np.moveaxis(array, channels, -1)
    if array.dtype != np.uint8:
        if array.min() < 0:
            array = array / 2 + 0.5  # from -1 to 1
        array = (array.clip(0, 1) * 255).round().astype(np.uint8)
    # The codec supports only even sides.
    return np.ascontiguousarray(array[:, : array.shape[1] // 2 * 2, : array.shape[2] // 2 * 2])


def video_file(frames: Any, fps: float, samples: Any = None, rate: int = DEFAULT_RATE) -> MediaFile:
    """Returns an MP4 file, with audio if there are samples."""
    from vllm_omni.diffusion.utils.media_utils import mux_video_audio_bytes

    waveform = None if samples is None else _channels(samples).numpy()
    content = mux_video_audio_bytes(frames, waveform, fps=fps, audio_sample_rate=rate)
    return MediaFile("video", "video/mp4", content)


def audio_file(samples: Any, rate: int) -> MediaFile:
    """Returns a 16-bit WAV file from samples between -1 and 1."""
    import torch

    channels = _channels(samples)
    numbers = (channels.T.clamp(-1, 1) * 32767).to(torch.int16).contiguous().numpy().astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(len(channels))
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(numbers.tobytes())
    return MediaFile("audio", "audio/wav", file.getvalue())


def _channels(samples: Any) -> Any:
    """Returns one or two rows, one per channel; pipelines give one piece or several to concatenate."""
    import torch

    pieces = samples if isinstance(samples, list | tuple) else [samples]
    rows = []
    for piece in pieces:
        found = torch.as_tensor(piece).detach().float().cpu().squeeze()
        rows.append(found if found.ndim == 2 and len(found) == 2 else found.reshape(1, -1))
    return torch.cat(rows, dim=1)


def text_of(result: Any) -> Output | None:
    """Returns the text of a stage that is not the last."""
    text = "".join(choice.text or "" for choice in result.outputs)
    tokens = [token for choice in result.outputs for token in choice.token_ids]
    return Output(tokens, text=text) if text or tokens else None


def refuse_failed(result: Any) -> None:
    """Raises EngineRequestFailed if a finished output contains an error, as vLLM-Omni reports some."""
    if result.error:
        raise EngineRequestFailed(str(result.error))


def is_aborted(result: Any) -> bool:
    """Returns whether the request was aborted."""
    return any(choice.finish_reason == "abort" for choice in result.outputs)
