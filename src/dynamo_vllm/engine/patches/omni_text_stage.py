"""Lets vLLM-Omni run plain language models as stages.

vLLM-Omni 0.30 passes additional arguments to its stages, which vLLM's model classes do not accept, and looks
up a stage's class in two registries. This module has a class for each architecture that drops those
arguments: `OmniStageQwen3ForCausalLM` for `Qwen3ForCausalLM`. Each is created when it is looked up, so every
text model of vLLM can be a stage.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from dynamo_vllm.engine.machine import device
from dynamo_vllm.engine.patches import table
from dynamo_vllm.engine.patches.patch import Where

PREFIX = "OmniStage"
ARCHITECTURE_VARIABLE = "DYN_VLLM_OMNI_ARCHITECTURE"
"""Names the plain architecture; the worker sets it for the processes of the stages."""


def register() -> None:
    """Registers the class in both registries, in the process of a stage."""
    architecture = os.environ.get(ARCHITECTURE_VARIABLE)
    if not architecture:
        return
    from vllm.model_executor.models import ModelRegistry
    from vllm_omni.model_executor.models import OmniModelRegistry

    for registry in (ModelRegistry, OmniModelRegistry):
        registry.register_model(PREFIX + architecture, f"{__name__}:{PREFIX}{architecture}")
    if device() == "cpu":
        table.apply(Where.CPU_WORKER)


def __getattr__(name: str) -> type:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return stage_class(name.removeprefix(PREFIX))


@functools.cache
def stage_class(architecture: str) -> type:
    """Returns the stage class for an architecture of vLLM."""
    from vllm.model_executor.models import ModelRegistry

    plain: Any = ModelRegistry.models[architecture].load_model_cls()
    known = frozenset(inspect.signature(plain.forward).parameters)

    class Stage(plain):  # type: ignore[misc]
        def forward(
            self,
            input_ids: Any,
            positions: Any,
            intermediate_tensors: Any = None,
            inputs_embeds: Any = None,
            **more: Any,
        ) -> Any:
            kept = {name: value for name, value in more.items() if name in known}
            return super().forward(
                input_ids,
                positions,
                intermediate_tensors=intermediate_tensors,
                inputs_embeds=inputs_embeds,
                **kept,
            )

    Stage.__name__ = Stage.__qualname__ = PREFIX + architecture
    Stage.__module__ = __name__
    return Stage
