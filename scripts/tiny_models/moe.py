"""Creates a tiny mixture of experts: a Qwen3-MoE with the weights of the tiny text model in four experts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dynamo_vllm.models import tiny

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS, CHOSEN = 4, 2
_SEED = 21
_MARK = {"model_type": "qwen3_moe", tiny.REVISION_KEY: tiny.REVISION}


def make_tiny_moe_model(folder: Path) -> Path:
    """Create the model in `folder`; a folder that has it is left as it is."""
    return tiny.make(folder, tiny.Kind(tiny.FILES, _write_files, _MARK))


def _write_files(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    dense = tiny.make_tiny_model(folder / "dense")
    config = json.loads((dense / "config.json").read_bytes())
    weights = load_file(dense / "model.safetensors")
    for name in tiny.FILES:
        (dense / name).rename(folder / name)
    dense.rmdir()
    random = np.random.default_rng(_SEED)
    cut = {}
    for name, weight in weights.items():
        before, found, projection = name.partition(".mlp.")
        if not found:
            cut[name] = weight
            continue
        # The hidden dimension of the MLP: rows of what goes in, columns of what comes out.
        parts = np.split(weight, EXPERTS, axis=1 if projection.startswith("down") else 0)
        for number, part in enumerate(parts):
            cut[f"{before}.mlp.experts.{number}.{projection}"] = np.ascontiguousarray(part)
        cut.setdefault(
            f"{before}.mlp.gate.weight",
            random.standard_normal((EXPERTS, config["hidden_size"]), dtype=np.float32),
        )
    more = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": config["intermediate_size"] // EXPERTS,
        "norm_topk_prob": True,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
    }
    tiny.write_json(folder / "config.json", {**config, **more, **_MARK})
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
