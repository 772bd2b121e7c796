"""Plans what `serve` starts for its demos: groups of workers for the models of the package."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_vllm.config import build, topology
from dynamo_vllm.config.engine_rules import CACHE_SIZE_ARGUMENTS
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.models import demo as models

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.rules.flags import EngineFlags
    from dynamo_vllm.config.topology import Topology, Values, WorkerGroup

DEFAULT, ALL = "chat", "all"
_CACHE_BYTES = 1 << 30
_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Demo:
    """One model, and the options of its worker besides folder and name."""

    model: str
    options: Values = field(default_factory=dict)
    adapters: tuple[str, ...] = ()


# The chat template is ChatML with hermes tool calls and qwen3 reasoning.
_PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
_LORA = Demo("chat", {**_PARSERS, "lora_enabled": True}, adapters=models.ADAPTERS)
_VISION = Demo("vision", {**_PARSERS, "enable_multimodal": True})
_IMAGE = Demo("image", {"omni": True})
_SEARCH = (Demo("embed"), Demo("rerank"))
_SPEECH = Demo("speech")
DEMOS: dict[str, tuple[Demo, ...]] = {
    DEFAULT: (Demo("chat", _PARSERS),),
    "lora": (_LORA,),
    "vision": (_VISION,),
    "image": (_IMAGE,),
    "search": (Demo("chat", _PARSERS), *_SEARCH),
    "speech": (_SPEECH,),
    ALL: (_LORA, _VISION, *_SEARCH, _SPEECH, _IMAGE),
}


def choose(name: str, device: str) -> tuple[list[Demo], list[str]]:
    """Return the demos of this name, and why some of `all` are left out."""
    checked = [(demo, obstacle(demo, device)) for demo in DEMOS[name]]
    found = [demo for demo, why in checked if why is None]
    reasons = [f"{models.served_name(demo.model)} cannot be served: {why}" for demo, why in checked if why]
    if not found:
        raise StartError("; ".join(reasons))
    return found, reasons


def obstacle(demo: Demo, device: str) -> str | None:
    """Return why this installation cannot serve it."""
    try:
        for name in (demo.model, *demo.adapters):
            models.folder(name)
    except StartError as exc:
        return str(exc)
    if not demo.options.get("omni"):
        return None
    from dynamo_vllm.engine.omni import arguments as omni_arguments

    missing = omni_arguments.missing(device)
    return None if missing is None else f"it {missing}"


# --- groups of workers ----------------------------------------------------------------------------------


def lacks_model(wanted: Topology, environment: Mapping[str, str]) -> bool:
    return any(_is_without_model(wanted, group, environment) for group in wanted.workers)


def _is_without_model(wanted: Topology, group: WorkerGroup, environment: Mapping[str, str]) -> bool:
    named = group.options.get("model") or wanted.model
    return not (named or {**environment, **group.env}.get("DYN_VLLM_MODEL"))


def needs_vllm(wanted: Topology, environment: Mapping[str, str]) -> bool:
    return any(_engine(group, environment) != "fake" for group in wanted.workers)


def _engine(group: WorkerGroup, environment: Mapping[str, str]) -> str | None:
    return group.options.get("engine") or {**environment, **group.env}.get("DYN_VLLM_ENGINE")


def put_in(
    wanted: Topology,
    demos: Sequence[Demo],
    environment: Mapping[str, str],
    device: str,
    gpus: Sequence[str] = (),
) -> Topology:
    """Turn every group without a model into one group per demo."""
    shared = gpus[:1] if len(demos) > 1 else ()
    groups: list[WorkerGroup] = []
    for group in wanted.workers:
        if not _is_without_model(wanted, group, environment):
            groups.append(group)
            continue
        _refuse_one_name_for_several(demos, group, environment)
        _refuse_encoder_of_text(demos, group)
        groups += (_group(group, demo, environment, device, shared) for demo in demos)
    return dataclasses.replace(wanted, workers=tuple(groups))


def _refuse_one_name_for_several(
    demos: Sequence[Demo], group: WorkerGroup, environment: Mapping[str, str]
) -> None:
    name = group.options.get("served_model_name") or environment.get("DYN_VLLM_SERVED_MODEL_NAME")
    if len(demos) > 1 and name:
        raise ConfigError(f"--served-model-name {name} would name {len(demos)} models; leave it out")


def _refuse_encoder_of_text(demos: Sequence[Demo], group: WorkerGroup) -> None:
    for demo in demos:
        if topology.card_of(group).encodes_media and not demo.options.get("enable_multimodal"):
            raise ConfigError(
                f"an encode worker has nothing to do for {models.served_name(demo.model)}, which takes no "
                "images; add --demo vision, name a model that takes them, or leave --encode out"
            )


def _group(
    group: WorkerGroup, demo: Demo, environment: Mapping[str, str], device: str, shared_gpu: Sequence[str]
) -> WorkerGroup:
    env = {**environment, **group.env}
    options = {"model": str(models.folder(demo.model)), **_unset(_options(demo), env), **group.options}
    if _engine(group, environment) == "fake":
        return dataclasses.replace(group, options=options)
    # For language models only: a quick start, and caches that leave room for others.
    if options.get("omni"):
        gpu = {_GPUS: shared_gpu[0]} if shared_gpu else {}
        return dataclasses.replace(group, options=options, env={**gpu, **group.env})
    more, given = {}, topology.plan_of(group).flags
    # vLLM 0.30: the variable wins over the flag.
    if device == "cpu" and _KV_SPACE not in env and not CACHE_SIZE_ARGUMENTS & given.keys():
        more[_KV_SPACE] = "1"
    if shared_gpu and _GPUS not in group.env:
        more[_GPUS] = shared_gpu[0]
    args = (*_flags(given, device, bool(shared_gpu)), *group.args)
    return dataclasses.replace(group, options=options, env={**more, **group.env}, args=args)


def _options(demo: Demo) -> dict[str, object]:
    found = {"served_model_name": (models.served_name(demo.model),), **demo.options}
    if demo.adapters:
        words = (f"{models.served_name(name)}={models.folder(name)}" for name in demo.adapters)
        found["lora_modules"] = tuple(words)
    return found


def _unset(options: Values, env: Mapping[str, str]) -> dict[str, object]:
    """Return those whose variable the user did not set."""
    variables = {item.name: item.option.env for item in build.declared(WorkerOptions)}
    return {name: value for name, value in options.items() if not env.get(variables[name])}


def _flags(given: EngineFlags, device: str, shares_gpu: bool) -> list[str]:
    """Settings for a quick start; the user's own settings win."""
    flags = {"enforce_eager": ["--enforce-eager"]}
    if device == "cpu":
        flags["dtype"] = ["--dtype", "float32"]
    if shares_gpu:
        # With a fixed size vLLM does not measure memory, which several starts at once would disturb.
        flags["gpu_memory_utilization"] = ["--gpu-memory-utilization", "0.1"]
        flags["kv_cache_memory_bytes"] = ["--kv-cache-memory-bytes", str(_CACHE_BYTES)]
    wanted = [words for name, words in flags.items() if name not in given and f"no_{name}" not in given]
    return [word for words in wanted for word in words]
