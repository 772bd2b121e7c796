"""Options of a worker for vLLM-Omni pipelines and their output."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.media import MediaOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniOptions(MediaOptions):
    """A process that generates images and video too. A chain of classes: slots allow no second base."""

    omni: bool = opt(
        False,
        "omni",
        "Run a vLLM-Omni pipeline: text, images, videos (docs/omni.md).",
        env="DYN_VLLM_OMNI",
    )
    stage_configs_path: str | None = opt(
        None,
        "omni",
        "Stages of the pipeline: a deploy config of vLLM-Omni 0.30, or an older stage file, which is "
        "translated (default: the model's own pipeline).",
        env="DYN_VLLM_STAGE_CONFIGS_PATH",
        older_envs=("DYN_OMNI_STAGE_CONFIGS_PATH",),
        flags=("--stage-configs-path", "--deploy-config"),
        metavar="FILE",
    )
    max_picture_side: int = opt(
        2048, "omni", "Longest side of a generated image.", env="DYN_VLLM_MAX_PICTURE_SIDE", metavar="PIXELS"
    )
    max_picture_steps: int = opt(
        200, "omni", "Most inference steps of an image.", env="DYN_VLLM_MAX_PICTURE_STEPS", metavar="STEPS"
    )
    max_pictures: int = opt(
        10, "omni", "Most images of one request (n).", env="DYN_VLLM_MAX_PICTURES", metavar="N"
    )
    max_picture_megapixels: float = opt(
        20.0,
        "omni",
        "Most pixels of all images of one request together, in millions.",
        env="DYN_VLLM_MAX_PICTURE_MEGAPIXELS",
        metavar="N",
    )
    max_video_megapixels: float = opt(
        128.0,
        "omni",
        "Most pixels of all frames of a generated video, in millions.",
        env="DYN_VLLM_MAX_VIDEO_MEGAPIXELS",
        metavar="N",
    )
