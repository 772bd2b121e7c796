"""Defines our own vLLM-Omni pipelines, and chooses the pipeline for a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_vllm.engine.patches.omni_text_stage import PREFIX
from dynamo_vllm.errors import ConfigError

TEXT, REWRITE = "dynamo_text", "dynamo_rewrite"
REWRITER = "rewriter"
"""The folder inside a diffusers model with a language model that rewrites prompts for the diffusion stage."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Names the pipeline for a model's folder."""

    name: str | None
    """None leaves the choice to vLLM-Omni."""
    architecture: str | None = None
    """The architecture of a plain language model that becomes a stage."""
    diffusion_class: str | None = None
    """The pipeline class of a diffusers model, from its model_index.json."""


def choose(model: str) -> Pipeline:
    """Chooses by the JSON files of the folder; imports nothing, so `resolve` may decide otherwise."""
    index, config = _json(Path(model, "model_index.json")), _json(Path(model, "config.json"))
    if index is not None:
        diffusion = str(index.get("_class_name", ""))
        rewriter = _json(Path(model, REWRITER, "config.json"))
        if rewriter is not None:
            named = _architecture(rewriter)
            if named is None:
                raise ConfigError(_no_architecture(str(Path(model, REWRITER))))
            return Pipeline(REWRITE, named, diffusion)
        return Pipeline(None, diffusion_class=diffusion)
    if config is None:
        return Pipeline(None)
    return Pipeline(TEXT, _architecture(config))


def known_to_omni(config: dict[str, Any]) -> bool:
    """Returns whether vLLM-Omni has a pipeline for a model with this config.json."""
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
    from vllm_omni.config.stage_config import PipelineConfig

    if config.get("model_type") in OMNI_PIPELINES:
        return True
    architectures = set(config.get("architectures") or ())
    return any(
        architectures & set(pipeline.hf_architectures)
        for pipeline in OMNI_PIPELINES.values()
        if isinstance(pipeline, PipelineConfig)
    )


def resolve(model: str) -> Pipeline:
    """Does the same as `choose`, but vLLM-Omni's own pipeline wins if it has one."""
    chosen = choose(model)
    if chosen.name == TEXT and known_to_omni(_json(Path(model, "config.json")) or {}):
        return Pipeline(None)
    if chosen.name == TEXT and chosen.architecture is None:
        raise ConfigError(_no_architecture(model))
    return chosen


def register(pipeline: Pipeline) -> None:
    """Registers our pipeline with vLLM-Omni, in the process that creates the engine."""
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, register_pipeline
    from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig

    if pipeline.name is None or pipeline.architecture is None or pipeline.name in OMNI_PIPELINES:
        return
    architecture = PREFIX + pipeline.architecture
    writes: dict[str, object] = {
        "stage_id": 0,
        "model_stage": "text",
        "execution_type": StageExecutionType.LLM_AR,
        "owns_tokenizer": True,
        "model_arch": architecture,
        "engine_output_type": "text",
    }
    if pipeline.name == TEXT:
        stages: tuple[object, ...] = (
            StagePipelineConfig(**writes, final_output=True, final_output_type="text"),
        )
    else:
        stages = (
            StagePipelineConfig(
                **writes,
                final_output=True,
                final_output_type="text",
                model_subdir=REWRITER,
                tokenizer_subdir=REWRITER,
            ),
            StagePipelineConfig(
                stage_id=1,
                model_stage="draw",
                execution_type=StageExecutionType.DIFFUSION,
                input_sources=(0,),
                final_output=True,
                final_output_type="image",
                model_arch=pipeline.diffusion_class,
                custom_process_input_func=f"{__name__}.prompt_of",
                omni_kv_config={"need_recv_cache": False},
            ),
        )
    register_pipeline(PipelineConfig(model_type=pipeline.name, model_arch=architecture, stages=stages))


def prompt_of(source_outputs: Any, prompt: Any = None, requires_media: bool = False) -> dict[str, Any] | None:
    """Returns the prompt of the second stage: the text of the first, or the user's own if that is empty."""
    if not source_outputs:
        return None
    said = prompt[0] if isinstance(prompt, list) and prompt else prompt
    asked = said if isinstance(said, dict) else {"prompt": str(said or "")}
    text = "".join(choice.text for choice in source_outputs[0].outputs).strip()
    made = {"prompt": text or str(asked.get("prompt", ""))}
    return {**made, "negative_prompt": asked["negative_prompt"]} if asked.get("negative_prompt") else made


def _architecture(config: dict[str, object]) -> str | None:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def _no_architecture(model: str) -> str:
    return (
        f"--model {model}: its config.json names no architecture, and vLLM-Omni has no pipeline for its "
        "model_type; add 'architectures'"
    )


def _json(path: Path) -> dict[str, object] | None:
    try:
        found = json.loads(path.read_text())
    except OSError:
        return None
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{path} is not JSON: {exc}") from None
    return found if isinstance(found, dict) else None
