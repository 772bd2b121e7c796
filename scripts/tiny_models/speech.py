"""Creates a tiny model that writes down speech, with random weights: a Whisper that hears ten seconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dynamo_vllm.models import tiny
from tiny_models.vision_base import linear, norm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiny_models.vision_base import Shapes

RATE = 16_000
SECONDS = 10
POSITIONS, CONTEXT = SECONDS * 50, 64
LANGUAGES = ("en", "de", "zh", "ja")
_REVISION = 1
_KEY = "dynamo_vllm_tiny_speech"
_SIZE, _INTERMEDIATE, _HEADS, _LAYERS, _MELS, _SEED = 64, 128, 2, 2, 40, 5
_END, _START = "<|endoftext|>", "<|startoftranscript|>"
_SPECIALS = (
    _END,
    _START,
    *(f"<|{language}|>" for language in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
_TIMES = tuple(f"<|{tick * 0.02:.2f}|>" for tick in range(POSITIONS + 1))
_FILES = (*tiny.FILES, "preprocessor_config.json")


def make_tiny_speech_model(folder: Path) -> Path:
    """Create the model in `folder`; a folder that has it is left as it is."""
    return tiny.make(folder, tiny.Kind(_FILES, _write, {_KEY: _REVISION}))


def _write(folder: Path) -> None:
    from safetensors.numpy import save_file

    vocabulary = _tokenizer(folder)
    tokens = {
        "bos_token_id": vocabulary[_END],
        "decoder_start_token_id": vocabulary[_START],
        "eos_token_id": vocabulary[_END],
        "pad_token_id": vocabulary[_END],
    }
    tiny.write_json(folder / "config.json", {**_config(len(vocabulary)), **tokens, _KEY: _REVISION})
    tiny.write_json(folder / "generation_config.json", {**tokens, "is_multilingual": True})
    tiny.write_json(folder / "preprocessor_config.json", _PREPROCESSING)
    save_file(_weights(vocabulary), folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(folder: Path) -> dict[str, int]:
    """Writes the words of `tiny`, and after them Whisper's own tokens; times are not special ones."""
    vocabulary = tiny.write_tokenizer(folder, (), "")
    path = folder / "tokenizer.json"
    written = json.loads(path.read_text())
    for token in (*_SPECIALS, *_TIMES):
        vocabulary[token] = len(vocabulary)
        told = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        written["added_tokens"].append(
            {"id": vocabulary[token], "content": token, **told, "special": token in _SPECIALS}
        )
    tiny.write_json(path, written)
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _END)
    tiny.write_json(
        folder / "tokenizer_config.json",
        {**names, "tokenizer_class": "WhisperTokenizer", "model_max_length": CONTEXT},
    )
    return vocabulary


def _config(vocab_size: int) -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", _LAYERS), ("attention_heads", _HEADS), ("ffn_dim", _INTERMEDIATE))
    }
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "begin_suppress_tokens": None,
        "d_model": _SIZE,
        "is_encoder_decoder": True,
        "max_source_positions": POSITIONS,
        "max_target_positions": CONTEXT,
        "num_mel_bins": _MELS,
        "scale_embedding": False,
        "suppress_tokens": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
        **sides,
    }


_PREPROCESSING = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "chunk_length": SECONDS,
    "feature_size": _MELS,
    "hop_length": 160,
    "n_fft": 400,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
    "sampling_rate": RATE,
}


def _shapes(vocab_size: int) -> Shapes:
    for name, channels in (("conv1", _MELS), ("conv2", _SIZE)):
        yield f"model.encoder.{name}.weight", (_SIZE, channels, 3)
        yield f"model.encoder.{name}.bias", (_SIZE,)
    yield "model.decoder.embed_tokens.weight", (vocab_size, _SIZE)
    for side, positions in (("encoder", POSITIONS), ("decoder", CONTEXT)):
        yield f"model.{side}.embed_positions.weight", (positions, _SIZE)
        yield from norm(f"model.{side}.layer_norm", _SIZE)
        for index in range(_LAYERS):
            at = f"model.{side}.layers.{index}"
            for attention in ("self_attn", "encoder_attn")[: 1 if side == "encoder" else 2]:
                yield from norm(f"{at}.{attention}_layer_norm", _SIZE)
                yield f"{at}.{attention}.k_proj.weight", (_SIZE, _SIZE)
                for name in ("q_proj", "v_proj", "out_proj"):
                    yield from linear(f"{at}.{attention}.{name}", _SIZE, _SIZE)
            yield from norm(f"{at}.final_layer_norm", _SIZE)
            yield from linear(f"{at}.fc1", _INTERMEDIATE, _SIZE)
            yield from linear(f"{at}.fc2", _SIZE, _INTERMEDIATE)


def _weights(vocabulary: Mapping[str, int]) -> dict[str, NDArray[np.float32]]:
    """Random. Cross-attention weighs most, so that another sound gets another text."""
    import numpy as np

    random = np.random.default_rng(_SEED)
    made: dict[str, NDArray[np.float32]] = {}
    for name, shape in _shapes(len(vocabulary)):
        if "norm" in name or name.endswith("bias"):
            made[name] = np.full(shape, float(name.endswith("norm.weight")), np.float32)
            continue
        spread = 1.5 / float(np.sqrt(np.prod(shape[1:])))
        if "embed" in name:
            spread = 0.2
        elif "encoder_attn" in name:
            spread *= 3
        made[name] = random.standard_normal(shape, np.float32) * np.float32(spread)
    return made
