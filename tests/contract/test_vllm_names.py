"""Tests that the declarations in `engine.vllm.names` match the installed vLLM."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import config as vllm_config
from vllm.config.compilation import CompilationConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.profiler import ProfilerConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.distributed.kv_events import BlockStored
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers import BaseRenderer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.request import Request

from dynamo_vllm.engine.vllm import names

CLASSES: dict[type, type] = {
    names.EngineArgs: AsyncEngineArgs,
    names.MultimodalConfig: MultiModalConfig,
    names.PoolerConfig: vllm_config.PoolerConfig,
    names.ModelConfig: vllm_config.ModelConfig,
    names.CacheConfig: vllm_config.CacheConfig,
    names.SchedulerConfig: vllm_config.SchedulerConfig,
    names.ParallelConfig: vllm_config.ParallelConfig,
    names.LoraConfig: vllm_config.LoRAConfig,
    names.KvTransferConfig: vllm_config.KVTransferConfig,
    names.KvEventsConfig: vllm_config.KVEventsConfig,
    names.SpeculativeConfig: vllm_config.SpeculativeConfig,
    names.CompilationConfig: CompilationConfig,
    names.ProfilerConfig: ProfilerConfig,
    names.StructuredOutputsConfig: StructuredOutputsConfig,
    names.Config: vllm_config.VllmConfig,
    names.Renderer: BaseRenderer,
    names.Resources: BackgroundResources,
    names.EngineCore: AsyncMPClient,
    names.Request: EngineCoreRequest,
    names.CachedRequest: Request,
    names.BlockStored: BlockStored,
    names.OffloadingGroup: OffloadingGroupConfig,
    names.OffloadingCache: OffloadingCacheConfig,
    names.OffloadingModel: OffloadingModelConfig,
    names.OffloadingParallel: OffloadingParallelConfig,
    names.OffloadingConfig: OffloadingConfig,
    names.OffloadingEvents: OffloadingKVEventsConfig,
    names.OffloadingSpec: TieringOffloadingSpec,
    names.OffloadRegion: SharedOffloadRegion,
    names.TransferJob: TransferJob,
    names.InputProcessor: InputProcessor,
    names.OutputProcessor: OutputProcessor,
    names.Llm: AsyncLLM,
}


def own(kind: type) -> Iterator[tuple[str, Any]]:
    """Returns what a class itself declares, by name: None for a field."""
    yield from ((name, None) for name in kind.__annotations__)
    yield from ((name, value) for name, value in vars(kind).items() if not name.startswith(("__", "_abc_")))


def declared(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in own(kind)
        if not name.startswith("_is_") and (value is None or callable(value) or isinstance(value, property))
    }


def held(kind: type) -> set[str]:
    """Returns what instances have: class attributes, fields, and attributes that methods set."""
    found = set(dir(kind))
    for one in kind.__mro__[:-1]:
        found |= set(inspect.get_annotations(one))
        if one.__module__.startswith("vllm"):
            found |= set(re.findall(r"self\.(\w+)(?:\s*:[^=\n]+)?\s*=[^=]", inspect.getsource(one)))
    return found


def test_every_class_is_compared() -> None:
    here = {one for one in vars(names).values() if inspect.isclass(one) and one.__module__ == names.__name__}
    assert here == set(CLASSES)


@pytest.mark.parametrize("described", CLASSES, ids=lambda kind: kind.__name__)
def test_vllms_class_has_what_we_use_of_it(described: type) -> None:
    wanted = set(declared(described))
    assert wanted and wanted - held(CLASSES[described]) == set()


def test_a_name_that_vllm_has_not_is_found() -> None:
    assert "errord" not in held(AsyncLLM) and "renderer" in held(AsyncLLM)


METHODS = [
    (described, name)
    for described in CLASSES
    for name, value in declared(described).items()
    if inspect.isfunction(value)
]


def parameters(kind: type, name: str) -> dict[str, inspect.Parameter]:
    return {k: v for k, v in inspect.signature(getattr(kind, name)).parameters.items() if k != "self"}


@pytest.mark.parametrize(("described", "name"), METHODS, ids=lambda part: getattr(part, "__name__", part))
def test_vllms_method_takes_what_we_give_it(described: type, name: str) -> None:
    ours, theirs = parameters(described, name), parameters(CLASSES[described], name)
    assert set(ours) <= set(theirs)
    more = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {k for k, v in theirs.items() if v.default is v.empty and v.kind not in more}
    assert needed <= set(ours)
    in_order = [k for k, v in ours.items() if v.kind is v.POSITIONAL_OR_KEYWORD]
    assert in_order == [*theirs][: len(in_order)] or set(in_order) <= {
        k for k, v in theirs.items() if v.kind is v.KEYWORD_ONLY
    }
