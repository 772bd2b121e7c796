"""Makes what a request carries besides tokens: images, sounds and embeddings, always the same for a seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiers_proof.requests import Ask

_SPREAD = 0.5
"""Of embeddings, as in the models' own tables."""


def prompt(ask: Ask, model_config: Any) -> Any:
    """Returns the prompt in vLLM's form."""
    if ask.embeds is not None:
        return {"prompt_embeds": embeddings(ask, model_config.get_hidden_size())}
    if ask.sound is not None:
        heard = {"prompt": "", "multi_modal_data": {"audio": (noise(ask.sound), 16_000)}}
        return {"encoder_prompt": heard, "decoder_prompt": {"prompt_token_ids": list(ask.prompt)}}
    found: dict[str, Any] = {"prompt_token_ids": list(ask.prompt)}
    if ask.salt is not None:
        found["cache_salt"] = ask.salt
    if ask.image is not None:
        config = model_config.hf_config
        marks = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
        found["prompt_token_ids"][:0] = marks
        found["multi_modal_data"] = {"image": picture(ask.image)}
    return found


def embeddings(ask: Ask, width: int) -> Any:
    import torch

    chance = np.random.default_rng(ask.embeds)
    rows = chance.standard_normal((len(ask.prompt), width), dtype=np.float32) * np.float32(_SPREAD)
    return torch.from_numpy(rows)


def picture(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (168, 168, 3), dtype=np.uint8))


def noise(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(16_000 * 3).astype(np.float32) * np.float32(0.3)
