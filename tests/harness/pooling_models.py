"""Creates tiny pooling models with random weights: an embedder, a cross-encoder, a classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDTH = 64
LONGEST = 2048
SMALLER = (16, 32, 64)
LABELS = ("red", "green", "blue")
WORDS = [f"{first}{last}" for first in "bdfgklmnprst" for last in ("a", "e", "i", "o", "ula", "ernat", "ist")]


LONG_WORD = "antidisestablishment"
"""vLLM refuses texts with more characters than the longest token times the context, blanks included."""


def words(count: int, start: int = 0) -> str:
    """Return a text of so many words, each one token."""
    return " ".join(WORDS[(start + 7 * number) % len(WORDS)] for number in range(count))


def make_embedder(folder: Path, **shape: int) -> Path:
    """Create a BERT of Sentence Transformers: mean of all tokens, length one, three lengths to cut to."""
    from transformers import BertModel

    _save(BertModel(_config(**shape)), folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": shape.get("hidden_size", WIDTH), "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    config = json.loads((folder / "config.json").read_text())
    config |= {"is_matryoshka": True, "matryoshka_dimensions": list(SMALLER)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_reranker(folder: Path, **shape: int) -> Path:
    from transformers import BertForSequenceClassification

    return _save(BertForSequenceClassification(_config(num_labels=1, **shape)), folder)


def make_classifier(folder: Path) -> Path:
    from transformers import BertForSequenceClassification

    names: dict[str, Any] = {
        "id2label": dict(enumerate(LABELS)),
        "label2id": {name: number for number, name in enumerate(LABELS)},
    }
    return _save(BertForSequenceClassification(_config(num_labels=len(LABELS), **names)), folder)


def _config(**more: Any) -> Any:
    import torch
    from transformers import BertConfig

    torch.manual_seed(1)
    # Large weights: else all texts get nearly the same vector, and a mistake would not show.
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertConfig(
        vocab_size=len(WORDS) + 6,
        max_position_embeddings=LONGEST,
        initializer_range=0.4 if "hidden_size" not in more else 0.05,
        **{"intermediate_size": 2 * WIDTH, **sizes, **more},
    )


def _save(model: Any, folder: Path) -> Path:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS, LONG_WORD])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True)
    )
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names).save_pretrained(
        folder
    )
    model.save_pretrained(folder)
    return folder
