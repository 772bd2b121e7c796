"""Lists all cases."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tiers_proof import plans
from tiers_proof.case import BOTH, CPU, GPU, GQA_BLOCK_BYTES, VISION_BLOCK_BYTES, Case, Life
from tiers_proof.requests import Plan, brief, everyday, quick, short, sparse

_HYBRID = {"enable_prefix_caching": True}
_SMALL_STEPS = {**_HYBRID, "max_num_batched_tokens": 32}
"""For Mamba 2: vLLM 0.32 fails on CPU if a step ends behind the end of a block (mamba_mixer2, line 880)."""
_LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_BF16 = {"dtype": "bfloat16"}
_CPU_MLA = {"block_size": 16, "attention_backend": "CPU_MLA"}
"""Of processors with AMX vLLM prefers another one, which has no float32."""
_SHORT = {"max_model_len": 256}
_LORA_CASE: dict[str, Any] = {"adapters": True, "flags": _LORA, "on_gpu": _BF16}
"""On a GPU vLLM has no kernels for adapters in float32."""


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
        flags=_CPU_MLA,
        on_gpu={**_BF16, "block_size": 64, "attention_backend": None},
        refused_on=CPU,
    ),
    _case(
        "sliding", "sliding window in all layers, as in Mistral", model="sliding", blocks=14, gpu_blocks=24
    ),
    _case(
        "interleaved",
        "sliding window in most layers, as in Gemma 3",
        model="interleaved",
        blocks=56,
        gpu_blocks=72,
    ),
    _case("sinks", "sliding window and sinks, as in GPT-OSS", model="sinks", blocks=60, on_gpu=_BF16),
    _case(
        "granite",
        "Mamba 2 and attention, as in Granite 4",
        sparse,
        model="granite",
        flags=_SMALL_STEPS,
        on_gpu={"max_num_batched_tokens": 160},
        blocks=34,
    ),
    _case(
        "falcon-h1",
        "Mamba 2 beside attention",
        sparse,
        model="falcon-h1",
        flags=_SMALL_STEPS,
        on_gpu={"max_num_batched_tokens": 160},
        blocks=34,
    ),
    _case(
        "jamba",
        "Mamba 1 and attention",
        sparse,
        model="jamba",
        flags={**_HYBRID, "block_size": 64},
        blocks=34,
    ),
    _case(
        "qwen3-next",
        "gated delta net and attention",
        sparse,
        model="qwen3-next",
        flags={**_HYBRID, **_BF16, "block_size": 128},
        on_gpu={"gdn_prefill_backend": "triton"},
        blocks=34,
    ),
    _case(
        "lfm2",
        "short convolutions and attention",
        sparse,
        model="lfm2",
        flags=_HYBRID,
        blocks=34,
    ),
    _case(
        "speech",
        "encoder and decoder: the same decoder prompt, other sound",
        plans.speech,
        blocks=400,
        model="speech",
        refused_on=BOTH,
        flags={"max_model_len": 64, "max_num_batched_tokens": 2048},
    ),
)
_REQUESTS = (
    _case(
        "no-prefix-cache",
        "vLLM's own prefix cache is off",
        refused_on=BOTH,
        flags={"enable_prefix_caching": False},
    ),
    _case("n", "three choices", functools.partial(short, n=3, regex="7{8}")),
    _case("prompt-logprobs", "log-probabilities of the prompt", plans.prompt_logprobs),
    _case("regex", "structured output", functools.partial(short, regex="[a-z ]{40}")),
    _case("salts", "two salts and none", plans.salts),
    _case("adapters", "two adapters and none", plans.adapters, **_LORA_CASE),
    _case("images", "the same text with other images", plans.images, model="vision", blocks=30),
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
            blocks=32,
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
    _worker("worker-adapters", "adapters, in our worker", plans.adapters, **_LORA_CASE),
    _worker("adapter-replaced", "an adapter gets other content", plans.other_adapter, **_LORA_CASE),
    _worker(
        "worker-embeds",
        "prompt embeddings, in our worker",
        plans.embeds,
        flags={"enable_prompt_embeds": True},
    ),
    _worker(
        "worker-images", "images, in our worker", plans.images, VISION_BLOCK_BYTES, model="vision", blocks=30
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
    _lives(
        "restart-dtype",
        "a new engine with another dtype",
        Life(plan=plans.other_life, flags={"dtype": "float16"}),
    ),
    _lives(
        "restart-weights",
        "a new engine with other weights in the same folder",
        Life(plan=plans.other_life, seed=77),
    ),
    Case(
        name="weights-back",
        what="other weights after sleep, then a new worker with the first ones",
        lives=[Life(plan=functools.partial(plans.after, "other-weights")), Life(plan=plans.other_life)],
        by_worker=True,
        other_weights=True,
        block_bytes=GQA_BLOCK_BYTES,
        on_gpu={"enable_sleep_mode": True},
    ),
    Case(
        name="restart-adapter",
        what="a new worker with other content of an adapter in the same folder",
        lives=[Life(plan=plans.first_adapter_life), Life(plan=plans.second_adapter_life, adapter_seed=2)],
        by_worker=True,
        block_bytes=GQA_BLOCK_BYTES,
        **_LORA_CASE,
    ),
)
_QUICK = (
    _case("quick-gqa", "for CI: grouped-query attention", quick, blocks=12, flags=_SHORT),
    _case("quick-interleaved", "for CI: several groups", quick, model="interleaved", blocks=40, flags=_SHORT),
    _case(
        "quick-mla",
        "for CI: multi-head latent attention",
        quick,
        model="mla",
        flags=_CPU_MLA,
        refused_on=CPU,
    ),
    _worker(
        "quick-weights",
        "for CI: other weights after sleep",
        functools.partial(plans.quickly_after, "other-weights"),
        other_weights=True,
        blocks=10,
        flags=_SHORT,
    ),
)
CASES: Sequence[str] = tuple(case.name for case in (*_LAYOUTS, *_REQUESTS, *_WORKER, *_RESTARTS))
BY_NAME = {case.name: case for case in (*_LAYOUTS, *_REQUESTS, *_WORKER, *_RESTARTS, *_QUICK)}
FIRST_ON_GPU = (
    *("mla", "fp8", "bfloat16", "int8-heads", "sliding", "interleaved", "sinks"),
    *("qwen3-next", "jamba", "lfm2", "granite", "falcon-h1", "images", "adapters", "gqa"),
    *("clear-kv", "sleep-1", "sleep-2", "other-weights", "restart", "draft_model", "eagle"),
)
"""What a CPU cannot show, then what a GPU does in another way."""
BROKEN_ON_GPU = ("mla", "fp8", "bfloat16", "int8-heads", "sliding", "interleaved", "qwen3-next", "granite")
"""Cases with a tolerance that is wider on a GPU: they are run with a wrong tier too."""
