"""Makes small models with random weights, one for each way in which vLLM lays out its KV cache.

Their weights are wide enough for attention to matter: one wrong block changes the log-probability of the next
token by far more than any rounding. Where a model must have experts, each token goes to all of them: which
ones are chosen would depend on rounding.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynamo_vllm.models import tiny

_SEED = 11
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}


def make(kind: str, folder: Path, seed: int = _SEED) -> Path:
    """Creates the model in `folder`; a folder that has it is left as it is."""
    if (folder / "config.json").is_file():
        return folder
    if kind in _OTHERS:
        return _OTHERS[kind](folder, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        vocabulary = tiny.write_tokenizer(new, tiny.SPECIAL_TOKENS, tiny.CHAT_TEMPLATE)
        _save(_CONFIGS[kind](len(vocabulary)), new, seed)
        new.rename(folder)
    return folder


def change_weights(folder: Path, new: Path, seed: int) -> Path:
    """Copies a model with other weights of the same shapes."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder, new)
    chance = np.random.default_rng(seed)
    weights = load_file(new / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
            weights[name] = chance.permuted(weight.reshape(-1)).reshape(weight.shape)
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    return new


def _save(config: Any, folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.no_grad():
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in made.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, _spread(name, weight.shape[1]))
    made.save_pretrained(folder)


def _spread(name: str, inputs: int) -> float:
    if "embed" in name:
        return 0.5
    return (0.64 if "lm_head" in name else 1.28) / math.sqrt(inputs)


def _mha(vocab_size: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**_SIZES, "num_key_value_heads": 4}, **_tokens(vocab_size))


def _mla(vocab_size: int) -> Any:
    """The sizes of a head are DeepSeek's own: vLLM's kernels have no others."""
    from transformers import DeepseekV2Config

    sizes = {name: size for name, size in _SIZES.items() if name != "head_dim"}
    return DeepseekV2Config(
        **{**sizes, "num_key_value_heads": 4},
        **_tokens(vocab_size),
        first_k_dense_replace=99,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )


def _sliding(vocab_size: int) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_SIZES, **_tokens(vocab_size), sliding_window=100)


def _interleaved(vocab_size: int) -> Any:
    from transformers import Gemma3TextConfig

    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        **_SIZES, **_tokens(vocab_size), sliding_window=100, layer_types=layers, query_pre_attn_scalar=64
    )


def _sinks(vocab_size: int) -> Any:
    from transformers import GptOssConfig

    layers = ["sliding_attention", "full_attention"] * 2
    return GptOssConfig(
        **_SIZES,
        **_tokens(vocab_size),
        sliding_window=100,
        layer_types=layers,
        num_local_experts=4,
        num_experts_per_tok=4,
    )


def _granite(vocab_size: int) -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **_SIZES,
        **_tokens(vocab_size),
        layer_types=["mamba", "attention"] * 2,
        shared_intermediate_size=512,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=1,
        mamba_chunk_size=32,
    )


def _falcon_h1(vocab_size: int) -> Any:
    from transformers import FalconH1Config

    return FalconH1Config(
        **_SIZES,
        **_tokens(vocab_size),
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_d_ssm=256,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=1,
        mamba_chunk_size=32,
    )


def _jamba(vocab_size: int) -> Any:
    from transformers import JambaConfig

    return JambaConfig(
        **_SIZES,
        **_tokens(vocab_size),
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=16,
        use_mamba_kernels=False,
    )


def _qwen3_next(vocab_size: int) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **_SIZES,
        **_tokens(vocab_size),
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )


def _lfm2(vocab_size: int) -> Any:
    from transformers import Lfm2Config

    sizes = {name: size for name, size in _SIZES.items() if name not in ("head_dim", "rms_norm_eps")}
    return Lfm2Config(
        **sizes,
        **_tokens(vocab_size),
        norm_eps=1e-6,
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        conv_dim=256,
        conv_dim_out=256,
        block_dim=256,
        block_ff_dim=512,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    )


def _tokens(vocab_size: int) -> dict[str, Any]:
    return {"vocab_size": vocab_size, **tiny.token_ids()}


_CONFIGS: Mapping[str, Callable[[int], Any]] = {
    "mha": _mha,
    "mla": _mla,
    "sliding": _sliding,
    "interleaved": _interleaved,
    "sinks": _sinks,
    "granite": _granite,
    "falcon-h1": _falcon_h1,
    "jamba": _jamba,
    "qwen3-next": _qwen3_next,
    "lfm2": _lfm2,
}


def _gqa(folder: Path, seed: int) -> Path:
    if seed == _SEED:
        return tiny.make_tiny_model(folder)
    with tempfile.TemporaryDirectory() as scratch:
        return change_weights(tiny.make_tiny_model(Path(scratch, "tiny")), folder, seed)


def _moe(folder: Path, _seed: int) -> Path:
    from tiny_models.moe import make_tiny_moe_model

    return make_tiny_moe_model(folder)


def _vision(folder: Path, _seed: int) -> Path:
    from tiny_models.vision import make_tiny_vision_model

    return make_tiny_vision_model(folder, "qwen2-vl")


def _speech(folder: Path, _seed: int) -> Path:
    from tiny_models.speech import make_tiny_speech_model

    return make_tiny_speech_model(folder)


_OTHERS: Mapping[str, Callable[[Path, int], Path]] = {
    "gqa": _gqa,
    "moe": _moe,
    "vision": _vision,
    "speech": _speech,
}
