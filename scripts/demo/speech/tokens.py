"""A tokenizer of Whisper's form: byte-level BPE in which a word is a token, and Whisper's control tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.speech.phrases import vocabulary

WINDOW = 10
"""Seconds that the model hears at once; real Whisper hears 30."""
TICKS = 50
"""Timestamps per second, as Whisper has them."""
END, START = "<|endoftext|>", "<|startoftranscript|>"
TRANSCRIBE, TRANSLATE = "<|transcribe|>", "<|translate|>"
PREVIOUS, NO_TIMES = "<|startofprev|>", "<|notimestamps|>"
LANGUAGE_CODES = (
    "en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr", "pl", "ca", "nl", "ar", "sv", "it",
    "id", "hi", "fi", "vi", "he", "uk", "el", "ms", "cs", "ro", "da", "hu", "ta", "no", "th", "ur",
    "hr", "bg", "lt", "la", "mi", "ml", "cy", "sk", "te", "fa", "lv", "bn", "sr", "az", "sl", "kn",
    "et", "mk", "br", "eu", "is", "hy", "ne", "mn", "bs", "kk", "sq", "sw", "gl", "mr", "pa", "si",
    "km", "sn", "yo", "so", "af", "oc", "ka", "be", "tg", "sd", "gu", "am", "yi", "lo", "uz", "fo",
    "ht", "ps", "tk", "nn", "mt", "sa", "lb", "my", "bo", "tl", "mg", "as", "tt", "haw", "ln", "ha",
    "ba", "jw", "su", "yue",
)  # fmt: skip
"""All that Whisper has: vLLM asks for the tokens of all languages when it detects one."""
SPECIAL = (
    END,
    START,
    *(f"<|{code}|>" for code in LANGUAGE_CODES),
    TRANSLATE,
    TRANSCRIBE,
    "<|startoflm|>",
    PREVIOUS,
    "<|nospeech|>",
    NO_TIMES,
)


def learn() -> Tokenizer:
    """Every word, with the blank before it, is one token; other text is cut into bytes."""
    words = [f" {word}" for word in vocabulary()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    # Whisper's timestamps are not special either: they are part of what it says.
    tokenizer.add_tokens(
        [AddedToken(time(tick), special=False, normalized=False) for tick in range(LAST + 1)]
    )
    return tokenizer


LAST = WINDOW * TICKS
"""The last timestamp."""


def time(tick: int) -> str:
    return f"<|{tick / TICKS:.2f}|>"


def language(code: str) -> str:
    return f"<|{code}|>"


def prompt(code: str, task: str = TRANSCRIBE, times: bool = False) -> str:
    """What vLLM gives the decoder to go on with; with times the first segment begins at 0."""
    return f"{START}{language(code)}{task}{time(0) if times else NO_TIMES}"


def padded(tokenizer: Tokenizer) -> int:
    """Rows of the embedding: a multiple of 64."""
    size: int = tokenizer.get_vocab_size()
    return -(-size // 64) * 64


def number(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return int(found)
