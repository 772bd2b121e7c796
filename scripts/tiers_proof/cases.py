"""Lists all cases."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tiers_proof import plans
from tiers_proof.case import BOTH, CPU, GPU, GQA_BLOCK_BYTES, VISION_BLOCK_BYTES, Case, Life
from tiers_proof.requests import Plan, brief, everyday, short

_HYBRID = {"enable_prefix_caching": True}
_LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_BF16 = {"dtype": "bfloat16"}


def _case(name: str, what: str, plan: Plan = everyday, **more: Any) -> Case:
    return Case(name=name, what=what, lives=[Life(plan=plan)], **more)


def _worker(name: str, what: str, plan: Plan, block_bytes: int = GQA_BLOCK_BYTES, **more: Any) -> Case:
    return _case(name, what, plan, by_worker=True, block_bytes=block_bytes, **more)


def _lives(name: str, what: str, second: Life, **more: Any) -> Case:
    return Case(name=name, what=what, lives=[Life(plan=plans.first_life), second], **more)


_LAYOUTS = (
    _case("gqa", "grouped-query attention, float32"),
    _case("mha", "multi-head attention", model="mha"),
    _case("moe", "mixture of experts", short, model="moe"),
    _case("bfloat16", "bfloat16", flags=_BF16),
    _case("float16", "float16", brief, flags={"dtype": "float16", "max_model_len": 320}, blocks=11),
    _case("block-16", "blocks of 16 tokens", flags={"block_size": 16}),
    _case("block-64", "blocks of 64 tokens", flags={"block_size": 64}),
    _case("block-128", "blocks of 128 tokens", short, flags={"block_size": 128}),
    _case("fp8", "KV cache in fp8", flags={**_BF16, "kv_cache_dtype": "fp8"}),
    _case(
        "int8-heads",
        "KV cache in int8 with a scale for each token and head",
        flags={**_BF16, "kv_cache_dtype": "int8_per_token_head"},
        devices=GPU,
    ),
    _case(
        "mla",
        "multi-head latent attention, as in DeepSeek",
        model="mla",
        flags={"block_size": 16},
        on_gpu={**_BF16, "block_size": 64},
        refused_on=CPU,
    ),
    _case("sliding", "sliding window in all layers, as in Mistral", model="sliding", blocks=14),
    _case("interleaved", "sliding window in most layers, as in Gemma 3", model="interleaved", blocks=56),
    _case("sinks", "sliding window and sinks, as in GPT-OSS", model="sinks", blocks=60, on_gpu=_BF16),
    _case("granite", "Mamba 2 and attention, as in Granite 4", model="granite", flags=_HYBRID, blocks=60),
    _case("falcon-h1", "Mamba 2 beside attention", model="falcon-h1", flags=_HYBRID, blocks=60),
    _case("jamba", "Mamba 1 and attention", model="jamba", flags=_HYBRID, blocks=60),
    _case("qwen3-next", "gated delta net and attention", model="qwen3-next", flags=_HYBRID, blocks=60),
    _case("lfm2", "short convolutions and attention", model="lfm2", flags=_HYBRID, blocks=60),
    _case(
        "speech",
        "encoder and decoder: the same decoder prompt, other sound",
        plans.speech,
        model="speech",
        refused_on=BOTH,
        flags={"max_model_len": 64, "max_num_batched_tokens": 2048},
    ),
)
_REQUESTS = (
    _case("no-prefix-cache", "vLLM's own prefix cache is off", flags={"enable_prefix_caching": False}),
    _case("n", "three choices, sampled with a seed", functools.partial(short, n=3)),
    _case("prompt-logprobs", "log-probabilities of the prompt", plans.prompt_logprobs),
    _case("regex", "structured output", functools.partial(short, regex="[a-z ]{40}")),
    _case("salts", "two salts and none", plans.salts),
    _case("adapters", "two adapters and none", plans.adapters, adapters=True, flags=_LORA),
    _case("images", "the same text with other images", plans.images, model="vision", blocks=60),
    _case("embeds", "prompt embeddings", plans.embeds, flags={"enable_prompt_embeds": True}),
    _case(
        "ngram",
        "speculative decoding from the prompt",
        plans.repetitive,
        flags={"speculative_config": _NGRAM},
    ),
    *(
        _case(
            method,
            what,
            plans.repetitive,
            flags={"speculative_config": {"method": method, "num_speculative_tokens": 2}},
            blocks=60,
        )
        for method, what in (
            ("draft_model", "speculative decoding with a draft model"),
            ("eagle", "speculative decoding with an EAGLE head"),
        )
    ),
    _case("tp", "two tensor-parallel ranks", short, flags={"tensor_parallel_size": 2}, devices=CPU),
)
_WORKER = (
    _worker("worker-salts", "salts, in our worker", plans.salts),
    _worker("worker-adapters", "adapters, in our worker", plans.adapters, adapters=True, flags=_LORA),
    _worker(
        "adapter-replaced", "an adapter gets other content", plans.other_adapter, adapters=True, flags=_LORA
    ),
    _worker(
        "worker-embeds",
        "prompt embeddings, in our worker",
        plans.embeds,
        flags={"enable_prompt_embeds": True},
    ),
    _worker(
        "worker-images", "images, in our worker", plans.images, VISION_BLOCK_BYTES, model="vision", blocks=60
    ),
    _worker("clear-kv", "clear-kv", functools.partial(plans.after, "clear")),
    _worker(
        "sleep-1",
        "sleep of level 1",
        functools.partial(plans.after, "sleep-1"),
        on_gpu={"enable_sleep_mode": True},
    ),
    _worker(
        "sleep-2",
        "sleep of level 2",
        functools.partial(plans.after, "sleep-2"),
        on_gpu={"enable_sleep_mode": True},
    ),
    _worker(
        "other-weights",
        "other weights after sleep of level 2",
        functools.partial(plans.after, "other-weights"),
        other_weights=True,
        on_gpu={"enable_sleep_mode": True},
    ),
    _worker("ranks", "two data-parallel ranks", plans.ranks, flags={"data_parallel_size": 2}, devices=CPU),
)
_RESTARTS = (
    _lives("restart", "a new engine", Life(plan=plans.second_life)),
    _lives(
        "restart-block",
        "a new engine with another block size",
        Life(plan=plans.other_life, flags={"block_size": 64}),
    ),
    _lives("restart-dtype", "a new engine with another dtype", Life(plan=plans.other_life, flags=_BF16)),
    _lives(
        "restart-weights",
        "a new engine with other weights in the same folder",
        Life(plan=plans.other_life, seed=77),
    ),
    Case(
        name="restart-adapter",
        what="a new worker with other content of an adapter in the same folder",
        lives=[Life(plan=plans.first_adapter_life), Life(plan=plans.second_adapter_life, adapter_seed=2)],
        adapters=True,
        by_worker=True,
        flags=_LORA,
        block_bytes=GQA_BLOCK_BYTES,
    ),
)
CASES: Sequence[Case] = (*_LAYOUTS, *_REQUESTS, *_WORKER, *_RESTARTS)
BY_NAME = {case.name: case for case in CASES}
