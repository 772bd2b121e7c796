"""Learns the tokenizer of both models: WordPiece over lower-case words of the documentation."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

PAD, UNKNOWN, FIRST, BETWEEN, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = 5120
MAX_TOKENS = 512


def learn(texts: Iterable[str], size: int = VOCABULARY) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = [(word, tokenizer.token_to_id(word)) for word in (FIRST, BETWEEN)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A {BETWEEN}",
        pair=f"{FIRST} $A {BETWEEN} $B:1 {BETWEEN}:1",
        special_tokens=ids,
    )
    return tokenizer


def settings() -> dict[str, object]:
    """Return tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "cls_token": FIRST,
        "sep_token": BETWEEN,
        "mask_token": MASK,
    }
