"""Refuses tiers for engines that would give wrong answers with them.

A tier gives a prompt its first blocks, and the engine computes the rest. vLLM turns prefix caching off where
an engine cannot do that, but its connectors load blocks all the same (0.30 to 0.32: `EngineCore.__init__`
hashes blocks if there is a connector, and the scheduler asks it). Seen with multi-head latent attention on
CPU, whose prefill ignores loaded blocks; models with layers that also look ahead are such engines too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_inner_dp_world_group, get_world_group, in_the_same_node_as

if TYPE_CHECKING:
    from dynamo_vllm.engine.vllm.names import Config


def refuse_engines_without_prefix_caching(config: Config | None = None) -> None:
    """Raises ValueError. A worker of vLLM calls it while it creates its KV cache."""
    config = config or get_current_vllm_config_or_none()
    if config is None or (config.cache_config.enable_prefix_caching and not _looks_ahead(config)):
        return
    raise ValueError(
        "KV tiers: vLLM has turned prefix caching off for this engine, which cannot continue a prompt from "
        "stored blocks; leave out --kv-offload-gb, --kv-offload-disk and --connector offload"
    )


def _looks_ahead(config: Config) -> bool:
    """Returns whether a layer is such that vLLM's scheduler turns prefix caching off; it tells no worker."""
    for layer in config.compilation_config.static_forward_context.values():
        read = getattr(layer, "get_kv_cache_spec", None)
        if read is not None and getattr(read(config), "non_causal", False):
            return True
    return False


def refuse_several_machines() -> None:
    """Refuses a tier behind host memory if that memory is on several machines.

    The scheduler reads its own machine's memory, where the parts of workers elsewhere are missing. All
    workers call this.
    """
    try:
        group = get_inner_dp_world_group()
    except AssertionError:  # of vLLM, if there is only one such group
        group = get_world_group()
    if not all(in_the_same_node_as(group.cpu_group, source_rank=0)):
        raise ValueError(
            "--kv-offload-disk: the tensor or pipeline parallel workers of this engine are on several "
            "machines, and one of them cannot store the others' KV caches; leave it out"
        )
