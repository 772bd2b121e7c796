"""Writes and reads the folder of demo-vision, as vLLM and transformers read it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer

from demo import export
from demo.model import Qwen3, Shape
from demo.tokenizer import padded
from demo.vision.model import Llava, TowerShape

IMAGE = "<image>"
"""The token for which a server puts the patches of a picture; vLLM takes it for granted."""


def with_image_token(tokenizer: Tokenizer) -> Tokenizer:
    """All ids stay as they are; the new token comes behind them."""
    grown = Tokenizer.from_str(tokenizer.to_str())
    grown.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    return grown


def on_top_of(chat: Qwen3, tokenizer: Tokenizer, tower: TowerShape) -> tuple[Llava, Tokenizer]:
    """A new tower before the language model of a demo-chat, whose embedding grows by the image token."""
    grown = with_image_token(tokenizer)
    rows = max(padded(grown), chat.shape.vocab_size)
    (image,) = grown.encode(IMAGE).ids
    model = Llava(Shape(**asdict(chat.shape) | {"vocab_size": rows}), tower, image)
    weights = chat.state_dict()
    name = "model.embed_tokens.weight"
    words = model.language_model.state_dict()[name].clone()
    words[: len(weights[name])] = weights[name]
    model.language_model.load_state_dict(weights | {name: words})
    return model, grown


def save(model: Llava, tokenizer: Tokenizer, folder: Path) -> Path:
    """A folder of a text model, with what a picture needs on top."""
    export.save_model(model.language_model, tokenizer, folder)
    config = json.loads((folder / "config.json").read_bytes())
    export.write(folder / "config.json", _config(config, model.tower, model.image_token))
    export.write(folder / "preprocessor_config.json", _pictures(model.tower))
    export.write(
        folder / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE,
            "num_additional_image_tokens": 0,
            "patch_size": model.tower.patch_size,
            "vision_feature_select_strategy": "full",
        },
    )
    tokens = json.loads((folder / "tokenizer_config.json").read_bytes())
    export.write(
        folder / "tokenizer_config.json",
        tokens | {"processor_class": "LlavaProcessor", "extra_special_tokens": {"image_token": IMAGE}},
    )
    export.save_weights(model, folder)
    return folder


def load(folder: Path, device: str = "cpu") -> tuple[Llava, Tokenizer]:
    """As exported: rounded weights, computed with in full precision."""
    config = json.loads((folder / "config.json").read_bytes())
    text = Shape(**{name: config["text_config"][name] for name in asdict(Shape())})
    tower = TowerShape(**{name: config["vision_config"][name] for name in asdict(TowerShape())})
    model = Llava(text, tower, config["image_token_index"])
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _config(text: dict[str, Any], tower: TowerShape, image_token: int) -> dict[str, Any]:
    ids = {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        **ids,
        "image_token_id": image_token,
        "image_token_index": image_token,
        "image_seq_length": tower.tokens,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": text,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "model_type": "siglip_vision_model",
            **asdict(tower),
            "attention_dropout": 0.0,
            "hidden_act": "gelu_pytorch_tanh",
            "num_channels": 3,
            "vision_use_head": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def _pictures(tower: TowerShape) -> dict[str, Any]:
    """How a server makes pixels of a picture: the whole of it, made square, from -1 to 1."""
    return {
        "image_processor_type": "SiglipImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": tower.image_size, "width": tower.image_size},
    }
