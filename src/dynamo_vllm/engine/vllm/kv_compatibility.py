"""Describes what must be equal in two vLLM engines before one can read the other's KV cache.

It also knows which connectors may load a cache that the request does not name.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

from dynamo_vllm.engine import machine
from dynamo_vllm.errors import InvalidRequest

if TYPE_CHECKING:
    from dynamo_vllm.engine.vllm.names import Config, KvTransferConfig
    from dynamo_vllm.job import Job, Terms


def lease_seconds(config: Config) -> float:
    """Returns the shortest lease of all connectors; vLLM's default if none is set."""
    transfer = config.kv_transfer_config
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    parts = [part.get("kv_connector_extra_config", {}) for part in extra.get("connectors", ())]
    return min(float(part.get("kv_lease_duration", 30)) for part in (extra, *parts))


_ON_REQUEST = frozenset(
    {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
)
"""Connectors that load only caches which the request names."""
_SKIPPING = frozenset({"TierConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"})
"""Connectors that look for no cache if the request's prompt must be computed. They keep caches for their own
engine only, and forget them when it sleeps."""


def connector_that_finds_caches(config: Config) -> str | None:
    """Returns a connector that may load a cache even if the prompt must be computed; None if none may."""
    transfer = config.kv_transfer_config
    names = _connectors(transfer) if transfer is not None else []
    return next((name for name in names if name not in _ON_REQUEST | _SKIPPING), None)


def connector_to_others(config: Config) -> str | None:
    """Returns a connector by which other engines may read this one's KV cache; None if none may."""
    transfer = config.kv_transfer_config
    names = _connectors(transfer) if transfer is not None else []
    return next((name for name in names if name not in _SKIPPING), None)


def refuse_prompt_logprobs(config: Config, job: Job) -> None:
    """Refuses prompt log-probabilities if vLLM would return wrong values or crash.

    They are a result of computing the prompt: if a connector finds its cache, vLLM 0.30 returns uninitialised
    memory. On CPU with LoRA they crash the engine if another request runs: vLLM 0.30 reads the adapter of
    each row of the prompt from a list with one entry per request.
    """
    if job.sampling.prompt_logprobs is None:
        return
    if found := connector_that_finds_caches(config):
        raise InvalidRequest(
            f"not supported with {found}, which may find the prompt in a cache; leave it out",
            parameter="prompt_logprobs",
        )
    if config.lora_config is not None and machine.device() == "cpu":
        raise InvalidRequest(
            "not supported by vLLM on a CPU with LoRA enabled; leave it out", parameter="prompt_logprobs"
        )


def encoder(config: Config) -> str:
    """Returns a name that is equal for engines whose encoders give the same output; it names their folder."""
    model = config.model_config
    multimodal = model.multimodal_config
    settings = (
        vllm.__version__,
        model.model,
        model.revision,
        model.dtype,
        model.quantization,
        repr(model.hf_overrides),
        multimodal.mm_encoder_attn_dtype if multimodal is not None else None,
        sorted((multimodal.mm_processor_kwargs or {}).items()) if multimodal is not None else None,
    )
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


def terms(config: Config) -> Terms:
    """Returns the settings that must be equal, by name; empty without a KV connector."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return {}
    model, cache, speculative = config.model_config, config.cache_config, config.speculative_config
    return {
        "vllm": vllm.__version__,
        "connector": _moving_connector(transfer),
        "model": str(model.model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "kv_layout": envs.VLLM_KV_CACHE_LAYOUT or _layout(config),
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "layers": model.get_total_num_hidden_layers(),
        "speculative": f"{speculative.method} {speculative.model}" if speculative is not None else "none",
        "hybrid_cache": "off" if config.scheduler_config.disable_hybrid_kv_cache_manager else "on",
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
    }


def _layout(config: Config) -> str:
    """Returns the order of heads and tokens in a block. A latent cache (MLA) has one head: what tiers want of
    it makes no difference, and the other engine may have none."""
    if config.model_config.use_mla:
        return "default"
    return get_kv_connector_cache_layout(config) or "default"


def _moving_connector(transfer: KvTransferConfig) -> str:
    """Returns the connector that moves caches between engines; offloading connectors need not be equal."""
    names = _connectors(transfer)
    return next((name for name in names if name.startswith("Nixl")), "+".join(sorted(set(names))))


def _connectors(transfer: KvTransferConfig) -> list[str]:
    parts = transfer.kv_connector_extra_config.get("connectors", ())
    return [str(part.get("kv_connector")) for part in parts] or [str(transfer.kv_connector)]
