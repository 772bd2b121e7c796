"""Reads the facts of a started vLLM: sizes, limits, what it supports and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.tasks import POOLING_TASKS, SCORE_TYPE_MAP

from dynamo_vllm.engine import machine
from dynamo_vllm.engine.vllm import control as vllm_control
from dynamo_vllm.engine.vllm import kv_compatibility, kv_events
from dynamo_vllm.engine.vllm.parts import media as vllm_media
from dynamo_vllm.engine.vllm.parts import speech as vllm_speech
from dynamo_vllm.job import AdapterLimits, EngineFacts, PoolingFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.engine_rules import Fired
    from dynamo_vllm.engine.vllm.names import Config, Llm, ModelConfig


def read(
    llm: Llm, fired: Sequence[Fired], relayed: Mapping[int, str], tasks: Sequence[str] = ()
) -> EngineFacts:
    """Returns the facts; `relayed` has the addresses of KV events from other nodes.

    `tasks` is what a pooling model can compute.
    """
    config = llm.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    ranks = llm.engine_core.engine_ranks_managed
    endpoints, topic = kv_events.addresses(config, ranks)
    pooling = _pooling(model, tasks)
    defaults = {} if pooling is not None else model.get_diff_sampling_param()
    return EngineFacts(
        context_length=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        block_size=cache.block_size,
        # vLLM gives the sum over all ranks; the router needs the blocks of one rank.
        total_kv_blocks=(cache.num_gpu_blocks or 0) // len(ranks),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        data_parallel_size=len(ranks),
        data_parallel_start_rank=ranks[0],
        kv_event_endpoints={**endpoints, **relayed},
        kv_event_topic=topic,
        bos_token_id=getattr(model.hf_config, "bos_token_id", None),
        sampling_defaults={k: v for k, v in defaults.items() if isinstance(v, int | float)},
        versions=machine.versions(),
        rules=[str(one) for one in fired],
        terms=kv_compatibility.terms(config),
        kv_lease_seconds=kv_compatibility.lease_seconds(config),
        adapters=_adapter_limits(config),
        media=vllm_media.limits(llm.renderer),
        encoder=kv_compatibility.encoder(config),
        sleep_refusal=_sleep_refusal(config),
        profile_folder=vllm_control.profile_folder(config),
        builds_lazily=True,
        compiles_kernels=machine.device() == "cuda",
        pooling=pooling,
        speech=vllm_speech.facts(llm.renderer, model),
    )


def _pooling(model: ModelConfig, tasks: Sequence[str]) -> PoolingFacts | None:
    pooler = model.pooler_config
    if model.runner_type != "pooling" or pooler is None:
        return None
    task = model.get_pooling_task(tasks) or ""
    labels = getattr(model.hf_config, "id2label", None) or {}
    count: int = getattr(model.hf_config, "num_labels", 0)
    scoring = SCORE_TYPE_MAP.get(task) if task != "classify" or count == 1 else None
    smaller = None
    if task in ("embed", "token_embed") and model.is_matryoshka:
        smaller = tuple(model.matryoshka_dimensions or ())
    return PoolingFacts(
        task=task,
        tasks=tuple(name for name in tasks if name in POOLING_TASKS),
        dimensions=model.embedding_size if task in ("embed", "token_embed") else 0,
        smaller=smaller,
        labels=tuple(labels.get(number) for number in range(count)) if task == "classify" else (),
        scoring=scoring,
        longest=pooler.max_embed_len or model.max_model_len,
    )


def _adapter_limits(config: Config) -> AdapterLimits | None:
    lora = config.lora_config
    if lora is None:
        return None
    if machine.device() == "cpu":
        # vLLM 0.30: when every slot holds an adapter, a request without one gets an adapter's output.
        return AdapterLimits(lora.max_loras - 1, lora.max_lora_rank)
    return AdapterLimits(lora.max_cpu_loras or lora.max_loras, lora.max_lora_rank)


def _sleep_refusal(config: Config) -> str | None:
    if kv_compatibility.connector_to_others(config) is not None:
        return "other engines read its KV cache, which sleep would free; stop it instead"
    if machine.device() == "cpu" or config.model_config.enable_sleep_mode:
        return None
    return "start it with --enable-sleep-mode, or use pause, which keeps the memory"
