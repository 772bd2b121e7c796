"""Estimates what tiers of KV caches in host memory and on disk hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.sizing import memory
from dynamo_vllm.sizing.memory import Layout

if TYPE_CHECKING:
    from dynamo_vllm.sizing.formats import WeightFormat
    from dynamo_vllm.sizing.memory import EngineLoad
    from dynamo_vllm.sizing.parts import Model

GB = 10**9
ONE_GPU = Layout()


def token_bytes(model: Model, form: WeightFormat, load: EngineLoad, layout: Layout = ONE_GPU) -> int:
    """Return what one token takes, in all layers and shards of an engine; windows are not counted.

    vLLM stores the part of each shard, also of heads that several shards have. A latent cache it stores once,
    if the engine has no pipeline stages.
    """
    value = memory.cache_value_bytes(form, load.cache_dtype)
    is_latent = any(weight.copied for layer in model.layers[:1] for weight in layer.weights)
    shards = 1 if is_latent and layout.pp == 1 else layout.tp
    return memory.token_bytes(model.layers, value, layout.tp) * shards


def tokens(gb: float, per_token: int) -> int:
    return int(gb * GB) // per_token
