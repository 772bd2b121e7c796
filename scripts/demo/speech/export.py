"""Writes demo-speech's folder as vLLM and transformers read it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import WhisperConfig, WhisperForConditionalGeneration

from demo.export import save_weights, write
from demo.speech import tokens
from demo.speech.espeak import RATE
from demo.speech.hearing import HOP, MELS, WIDTH
from demo.speech.windows import POSITIONS

_TIED = "proj_out.weight"
"""The same as the decoder's embedding."""


def save(model: WhisperForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    described = config.to_dict() | {"architectures": ["WhisperForConditionalGeneration"], "dtype": "bfloat16"}
    described.pop("transformers_version", None)
    write(folder / "config.json", described)
    write(folder / "generation_config.json", _generation(tokenizer))
    write(folder / "preprocessor_config.json", _hearing())
    write(folder / "tokenizer_config.json", _tokenizer_config())
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    save_weights(_Untied(model), folder)
    return folder


def load(folder: Path, device: str = "cpu") -> tuple[WhisperForConditionalGeneration, Tokenizer]:
    """As exported: rounded weights, computed with in full precision."""
    config = WhisperConfig.from_json_file(folder / "config.json")
    config.dtype = torch.float32
    model = WhisperForConditionalGeneration(config).float()
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


class _Untied(torch.nn.Module):
    """The model without its output head, which is its embedding."""

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        super().__init__()
        self._model = model

    def state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self._model.state_dict().items() if name != _TIED}


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    number = partial(tokens.number, tokenizer)
    languages = (tokens.language(code) for code in tokens.LANGUAGE_CODES)

    return {
        "bos_token_id": number(tokens.END),
        "decoder_start_token_id": number(tokens.START),
        "eos_token_id": number(tokens.END),
        "is_multilingual": True,
        "lang_to_id": {token: number(token) for token in languages},
        "max_length": POSITIONS,
        "no_timestamps_token_id": number(tokens.NO_TIMES),
        "pad_token_id": number(tokens.END),
        "prev_sot_token_id": number(tokens.PREVIOUS),
        "return_timestamps": False,
        "task_to_id": {"transcribe": number(tokens.TRANSCRIBE), "translate": number(tokens.TRANSLATE)},
    }


def _hearing() -> dict[str, Any]:
    return {
        "chunk_length": tokens.WINDOW,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": MELS,
        "hop_length": HOP,
        "n_fft": WIDTH,
        "n_samples": tokens.WINDOW * RATE,
        "nb_max_frames": tokens.WINDOW * RATE // HOP,
        "padding_side": "right",
        "padding_value": 0.0,
        "processor_class": "WhisperProcessor",
        "return_attention_mask": False,
        "sampling_rate": RATE,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "add_prefix_space": False,
        "bos_token": tokens.END,
        "eos_token": tokens.END,
        "model_max_length": POSITIONS,
        "pad_token": tokens.END,
        "processor_class": "WhisperProcessor",
        "tokenizer_class": "WhisperTokenizer",
        "unk_token": tokens.END,
    }
