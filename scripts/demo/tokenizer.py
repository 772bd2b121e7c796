"""The model's own byte-level BPE, learnt from what the generator writes.

Digits, Chinese characters, blanks between words and line ends are tokens of their own. So a word is the same
tokens after a blank as inside quotes, and copying a name into a tool call is copying tokens; a sum has one
token per digit; and a prompt that ends with a line end is cut as the text that was trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.generator.mix import train_example
from demo.template import render

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (END_OF_TEXT, TURN_START, TURN_END)
"""Never part of an answer."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Whole tokens that parsers look for in the answer, so they must not be skipped when it is decoded."""
_WHOLE = re.compile("|".join(re.escape(token) for token in CONTROL + MARKS))
VOCABULARY = 2048
"""Small on purpose: names nobody trained on are cut into pieces everybody trained on."""
EXAMPLES = 20_000
PIECES = r"\p{Han}|(?:(?!\p{Han})\p{L})+|\p{N}|\n|[^\p{L}\p{N}\n]+"


def learn(seed: int, examples: int = EXAMPLES, size: int = VOCABULARY) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=20,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL]
        + [AddedToken(token, special=False, normalized=False) for token in MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, examples), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    # Read anew: until then it takes for control tokens all that the trainer was given.
    return Tokenizer.from_str(tokenizer.to_str())


def _texts(seed: int, examples: int) -> Iterator[str]:
    """What stands between control tokens and marks: the trainer would take these for text."""
    for index in range(examples):
        yield from _WHOLE.split(render(train_example(seed, index)))


def padded(tokenizer: Tokenizer) -> int:
    """Rows of the embedding: a multiple of 64, which suits matrix units and tensor parallelism."""
    size: int = tokenizer.get_vocab_size()
    return -(-size // 64) * 64
