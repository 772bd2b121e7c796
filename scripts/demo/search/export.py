"""Writes folders of both models as vLLM and sentence-transformers read them, and reads them again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import Tokenizer

from demo.export import save_weights, write
from demo.search import tokens
from demo.search.bert import Bert, Reranker, Shape
from demo.search.words import DIMENSIONS

EMBED, RERANK = "demo-embed", "demo-rerank"
_MODULES = ("Transformer", "Pooling", "Normalize")


def save_embedder(model: Bert, tokenizer: Tokenizer, folder: Path) -> Path:
    config = _config(model.shape, "BertModel") | {
        "is_matryoshka": True,
        "matryoshka_dimensions": [*DIMENSIONS, model.shape.hidden_size],
    }
    _save(config, tokenizer, folder)
    save_weights(model, folder)
    modules: list[dict[str, Any]] = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(_MODULES)
    ]
    write(folder / "modules.json", modules)
    for name in ("1_Pooling", "2_Normalize"):
        (folder / name).mkdir(exist_ok=True)
    pooling = {
        "word_embedding_dimension": model.shape.hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    write(folder / "1_Pooling" / "config.json", pooling)
    write(folder / "2_Normalize" / "config.json", {})
    write(folder / "sentence_bert_config.json", {"max_seq_length": tokens.MAX_TOKENS, "do_lower_case": False})
    write(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"})
    return folder


def save_reranker(model: Reranker, tokenizer: Tokenizer, folder: Path) -> Path:
    config = _config(model.shape, "BertForSequenceClassification") | {
        "id2label": {"0": "relevance"},
        "label2id": {"relevance": 0},
    }
    _save(config, tokenizer, folder)
    save_weights(model, folder)
    return folder


def load_embedder(folder: Path, device: str = "cpu") -> tuple[Bert, Tokenizer]:
    """Return it as exported: rounded weights, computed with in full precision."""
    model = Bert(_shape(folder))
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def load_reranker(folder: Path, device: str = "cpu") -> tuple[Reranker, Tokenizer]:
    model = Reranker(_shape(folder))
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _save(config: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", config)
    write(folder / "tokenizer_config.json", tokens.settings())
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def _config(shape: Shape, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "bert",
        **asdict(shape),
        "hidden_act": "relu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "position_embedding_type": "absolute",
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }


def _shape(folder: Path) -> Shape:
    config = json.loads((folder / "config.json").read_bytes())
    return Shape(**{name: config[name] for name in asdict(Shape())})
