"""Reads the stage file of a vLLM-Omni 0.30 pipeline, or translates an older one. Imports no vLLM.

Since 0.30 a file says only how a pipeline is deployed (devices, limits, defaults); the registered pipeline
defines its stages. Older files (`stage_args`) had both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dynamo_vllm.errors import ConfigError

OLDER_KEY = "stage_args"
_RUNTIME_KEPT = {"devices": "devices", "max_batch_size": "max_num_seqs", "num_replicas": "num_replicas"}
_TOPOLOGY_ARGS = {
    "model_stage",
    "model_arch",
    "worker_type",
    "worker_cls",
    "scheduler_cls",
    "engine_output_type",
    "hf_config_name",
    "stage_id",
}
"""Engine arguments of older files that the registered pipeline defines since 0.30."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Holds a deploy config of vLLM-Omni 0.30, and what was translated to get it."""

    deploy: dict[str, Any]
    kinds: tuple[str, ...] = ()
    """The kinds of stages in an older file: llm or diffusion; empty for a file of 0.30."""
    dropped: tuple[str, ...] = field(default=())
    """The settings of an older file that 0.30 does not support."""

    @property
    def is_translated(self) -> bool:
        return bool(self.kinds)

    def text(self) -> str:
        return yaml.safe_dump(self.deploy, sort_keys=False)


def read(path: str) -> Stages:
    """Reads the file at `path`. Raises ConfigError with the fix."""
    flag = f"--stage-configs-path {path}"
    try:
        found = yaml.safe_load(Path(path).read_text())
    except OSError as exc:
        raise ConfigError(f"{flag}: {exc.strerror or exc}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag} is not YAML: {exc}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be a mapping with 'stages'")
    if isinstance(base := found.get("base_config"), str):
        # vLLM-Omni resolves it relative to the file it reads, which is our copy in another folder.
        found["base_config"] = str(Path(path).absolute().parent / base)
    if OLDER_KEY in found:
        return translated(found, flag)
    stages = found.get("stages")
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        if {"base_config", "pipeline"} & set(found):
            return Stages(found)
        raise ConfigError(f"{flag} has neither 'stages' (vLLM-Omni 0.30) nor '{OLDER_KEY}' (older)")
    for at, stage in enumerate(stages):
        if not isinstance(stage.get("stage_id"), int):
            raise ConfigError(f"{flag}: stages[{at}] has no stage_id; number them from 0")
    return Stages(found)


def translated(older: dict[str, object], flag: str) -> Stages:
    """Translates an older file to the form of 0.30."""
    listed = older[OLDER_KEY]
    if not isinstance(listed, list) or not listed or not all(isinstance(stage, dict) for stage in listed):
        raise ConfigError(f"{flag}: '{OLDER_KEY}' must be a list of stages")
    dropped = [key for key in older if key not in (OLDER_KEY, "async_chunk")]
    deploy: dict[str, object] = {"async_chunk": bool(older.get("async_chunk", False))}
    stages, kinds = [], []
    for at, stage in enumerate(listed):
        made, lost = _stage(stage, at, flag)
        stages.append(made)
        kinds.append(str(stage.get("stage_type", "llm")))
        dropped += [f"stage {at}: {name}" for name in lost]
    deploy["stages"] = stages
    return Stages(deploy, tuple(kinds), tuple(dropped))


def _stage(stage: dict[str, object], at: int, flag: str) -> tuple[dict[str, object], list[str]]:
    def mapping(name: str) -> dict[str, object]:
        found = stage.get(name) or {}
        if not isinstance(found, dict):
            raise ConfigError(f"{flag}: {name} of {OLDER_KEY}[{at}] must be a mapping, not {found!r}")
        return found

    number = stage.get("stage_id", at)
    if not isinstance(number, int):
        raise ConfigError(f"{flag}: {OLDER_KEY}[{at}] has stage_id {number!r}; number them from 0")
    made: dict[str, object] = {"stage_id": number}
    lost = [
        name
        for name in stage
        if name
        not in ("stage_id", "stage_type", "runtime", "engine_args", "default_sampling_params", "final_output",
                "final_output_type", "engine_input_source", "is_comprehension")
    ]  # fmt: skip
    for name, value in mapping("runtime").items():
        if name in _RUNTIME_KEPT:
            made[_RUNTIME_KEPT[name]] = str(value) if name == "devices" else value
        elif name != "process":
            lost.append(f"runtime.{name}")
    made |= {name: value for name, value in mapping("engine_args").items() if name not in _TOPOLOGY_ARGS}
    if params := mapping("default_sampling_params"):
        made["default_sampling_params"] = params
    return made, lost
