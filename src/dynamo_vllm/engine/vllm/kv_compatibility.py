"""Describes what two vLLM engines must have alike, before one can read the other's KV cache.

And which connectors bring a cache that nobody named.
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
    """The shortest lease of all connectors; vLLM's default where none is set."""
    transfer = config.kv_transfer_config
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    parts = [part.get("kv_connector_extra_config", {}) for part in extra.get("connectors", ())]
    return min(float(part.get("kv_lease_duration", 30)) for part in (extra, *parts))


_ASKED = frozenset(
    {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
)
"""Connectors that bring the caches which a request names."""
_HEEDING = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
"""Those that look for none when a request's prompt has to be computed."""


def unasked_connector(config: Config) -> str | None:
    """One that may bring the cache of a prompt which has to be computed; None where there is none."""
    transfer = config.kv_transfer_config
    names = _connectors(transfer) if transfer is not None else []
    return next((name for name in names if name not in _ASKED | _HEEDING), None)


def refuse_prompt_logprobs(config: Config, job: Job) -> None:
    """They come of computing a prompt: of a cache that was found vLLM 0.30 tells memory that nobody wrote.

    And on CPU they end an engine that takes adapters, beside any other request: it reads the adapter of each
    row of a prompt from a list with one entry per request.
    """
    if job.sampling.prompt_logprobs is None:
        return
    if found := unasked_connector(config):
        raise InvalidRequest(
            f"{found} of this worker may find a prompt's cache, which has none; leave it out",
            parameter="prompt_logprobs",
        )
    if config.lora_config is not None and machine.device() == "cpu":
        raise InvalidRequest(
            "vLLM's CPU engine has none where it takes adapters; leave it out", parameter="prompt_logprobs"
        )


def encoder(config: Config) -> str:
    """One for all engines whose encoders make the same of a medium: a folder of theirs is called so."""
    model = config.model_config
    multimodal = model.multimodal_config
    told = (
        vllm.__version__,
        model.model,
        model.revision,
        model.dtype,
        model.quantization,
        repr(model.hf_overrides),
        multimodal.mm_encoder_attn_dtype if multimodal is not None else None,
        sorted((multimodal.mm_processor_kwargs or {}).items()) if multimodal is not None else None,
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def terms(config: Config) -> Terms:
    """Empty without a KV connector."""
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
        "kv_layout": envs.VLLM_KV_CACHE_LAYOUT or get_kv_connector_cache_layout(config) or "default",
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "layers": model.get_total_num_hidden_layers(),
        "speculative": f"{speculative.method} {speculative.model}" if speculative is not None else "none",
        "hybrid_cache": "off" if config.scheduler_config.disable_hybrid_kv_cache_manager else "on",
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
    }


def _moving_connector(transfer: KvTransferConfig) -> str:
    """The one that brings caches from engine to engine; what keeps them beside it is a worker's own."""
    names = _connectors(transfer)
    return next((name for name in names if name.startswith("Nixl")), "+".join(sorted(set(names))))


def _connectors(transfer: KvTransferConfig) -> list[str]:
    parts = transfer.kv_connector_extra_config.get("connectors", ())
    return [str(part.get("kv_connector")) for part in parts] or [str(transfer.kv_connector)]
