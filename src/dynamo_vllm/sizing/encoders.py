"""Computes the weights of models that do not only decode: BERT-like encoders, and Whisper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.sizing.parts import Cache, Facts, Layer, Model, Part, Split, Weight, matrix, times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NOTHING = Cache(heads=0, per_head=0)
"""An encoder keeps nothing of a text."""


def _block(attention: int, hidden: int, inner: int, *, key_bias: bool = True) -> Iterator[Weight]:
    """A layer with so many attentions, each with four matrices and a norm, and an MLP with one."""
    for number in range(4 * attention):
        has_bias = key_bias or number % 4 > 0
        yield from matrix(Part.ATTENTION, hidden, hidden, Split.SHARDS, has_bias=has_bias)
    yield from matrix(Part.MLP, inner, hidden, Split.SHARDS, has_bias=True)
    yield from matrix(Part.MLP, hidden, inner, Split.SHARDS, has_bias=True)
    yield Weight(Part.NORMS, 2 * (attention + 1) * hidden)


def _bert(facts: Facts, kind: str) -> Model:
    hidden, vocabulary = facts.positive("hidden_size"), facts.positive("vocab_size")
    positions, inner = facts.positive("max_position_embeddings"), facts.positive("intermediate_size")
    layer = Layer(tuple(_block(1, hidden, inner)), _NOTHING)
    types = facts.number("type_vocab_size", default=2)
    named = facts.list("architectures") or ()
    is_classifier = any("ForSequenceClassification" in str(name) for name in named)
    labels = facts.values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else facts.number("num_labels", default=2)
    head = hidden * hidden + hidden + count * (hidden + 1) if is_classifier else 0
    return Model(
        family=kind,
        hidden=hidden,
        vocabulary=vocabulary,
        # RoBERTa counts positions from the number of its padding token.
        max_len=positions - (2 if "roberta" in kind else 0),
        heads=facts.positive("num_attention_heads"),
        kv_heads=facts.positive("num_attention_heads"),
        widths=(inner,),
        embeddings=(
            Weight(Part.EMBEDDINGS, vocabulary * hidden, Split.SHARDS),
            Weight(Part.EMBEDDINGS, (positions + types) * hidden),
        ),
        layers=(layer,) * facts.positive("num_hidden_layers"),
        ending=(Weight(Part.NORMS, 2 * hidden), *((Weight(Part.HEAD, head),) if head else ())),
    )


def _whisper(facts: Facts, kind: str) -> Model:
    """Count a sound as tokens of a request: the decoder keeps keys and values of each of its positions."""
    hidden, vocabulary = facts.positive("d_model"), facts.positive("vocab_size")
    heads = facts.positive("decoder_attention_heads")
    sound, text = facts.positive("max_source_positions"), facts.positive("max_target_positions")
    hears = times(
        _block(1, hidden, facts.positive("encoder_ffn_dim"), key_bias=False), facts.positive("encoder_layers")
    )
    # Two convolutions of width three.
    before = 3 * hidden * (facts.positive("num_mel_bins", default=80) + hidden) + 2 * hidden
    inner = facts.positive("decoder_ffn_dim")
    layer = Layer(tuple(_block(2, hidden, inner, key_bias=False)), Cache(heads, 2 * (hidden // heads)))
    return Model(
        family=kind,
        hidden=hidden,
        vocabulary=vocabulary,
        max_len=sound + text,
        heads=heads,
        kv_heads=heads,
        widths=(inner,),
        embeddings=(
            Weight(Part.EMBEDDINGS, vocabulary * hidden, Split.SHARDS),
            Weight(Part.EMBEDDINGS, text * hidden),
        ),
        layers=(layer,) * facts.positive("decoder_layers"),
        ending=(Weight(Part.NORMS, 2 * hidden),),
        vision=tuple(
            Weight(Part.ENCODER, one.count, one.split, one.is_linear)
            for one in (*hears, Weight(Part.ENCODER, before + (sound + 2) * hidden))
        ),
        is_tied=True,
    )


FAMILIES: dict[str, Callable[[Facts, str], Model]] = {
    "bert": _bert,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "whisper": _whisper,
}
"""By the config's `model_type`."""


def read(facts: Facts, kind: str) -> Model:
    return FAMILIES[kind](facts, kind)
