"""Rules for adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.rules.flags import EngineFlags


def adapter_size_is_a_size(o: WorkerOptions, _: EngineFlags) -> None:
    if not o.lora_max_gb > 0:  # false for NaN too
        raise ConfigError(f"--lora-max-gb {o.lora_max_gb} must be above 0")


def adapters_are_switched_on(o: WorkerOptions, engine: EngineFlags) -> None:
    is_on = o.lora_enabled or "enable_lora" in engine
    if o.lora_modules and not is_on:
        raise ConfigError("--lora-modules needs --enable-lora or DYN_LORA_ENABLED=1")
    if o.lora_enabled and "no_enable_lora" in engine:
        raise ConfigError("--no-enable-lora contradicts DYN_LORA_ENABLED; leave one of them out")


def adapters_have_names(o: WorkerOptions, _: EngineFlags) -> None:
    names = [word.partition("=")[0] for word in o.lora_modules]
    for word, name in zip(o.lora_modules, names, strict=True):
        if not name or "=" not in word or word.endswith("="):
            raise ConfigError(f"--lora-modules {word!r} is not NAME=URI, such as sql=hf://owner/name")
        if names.count(name) > 1:
            raise ConfigError(f"--lora-modules names {name!r} twice; give each adapter its own name")


RULES = (
    adapters_are_switched_on,
    adapters_have_names,
    adapter_size_is_a_size,
)
