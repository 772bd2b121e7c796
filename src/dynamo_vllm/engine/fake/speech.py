"""Writes down sounds without a model: a word for each second, which follows from its samples."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from dynamo_vllm.codec.transcripts import Joiner
from dynamo_vllm.engine import sound
from dynamo_vllm.job import Output, SpeechPiece, SpeechSegment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_vllm.job import Job, SpeechSpec

RATE = 16_000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LANGUAGES = ("en", "de", "zh")
DETECTED = "de"
"""What it takes every sound for, if the client does not say."""
WORDS_PER_SEGMENT = 4


class FakeSpeech:
    """Prompts of four tokens, and one for each character of a hint."""

    def __init__(self, vocab_size: int, context_length: int, window_seconds: float) -> None:
        self._vocab_size = vocab_size
        self._most = context_length // 2 - 1
        self._window_seconds = window_seconds

    async def hint(self, text: str) -> list[int]:
        return [ord(char) % self._vocab_size for char in text][-self._most :]

    def prompt(self, task: str, language: str | None, hint: Sequence[int], *, timestamps: bool) -> list[int]:
        spoken = LANGUAGES.index(language) if language else 0
        return [*hint, 1, 2 + spoken, 5 + (task == "translate"), 7 + timestamps]

    async def windows(self, samples: Any, rate: int) -> list[tuple[int, int]]:
        return sound.windows(samples, rate, self._window_seconds)

    def silence(self) -> tuple[Any, int]:
        return sound.silence(RATE, 1.0), RATE


def outputs(job: Job, spec: SpeechSpec) -> Iterator[Output]:
    """Yields a word at a time, or with timestamps a window at a time, and then the end."""
    language = spec.language or DETECTED
    joiner = Joiner("en" if spec.task == "translate" else language)
    for first, last in spec.windows:
        joiner.begin_window()
        words = list(_words(spec, first, last))[: job.sampling.max_tokens]
        if spec.timestamps:
            segments = list(_segments(words, first / spec.rate, (last - first) / spec.rate))
            text = "".join(joiner.add(segment.text) for segment in segments)
            ids = [token for segment in segments for token in segment.token_ids]
            yield Output(ids, speech=SpeechPiece(text, language, segments))
            continue
        for word in words:
            yield Output([_token(word)], speech=SpeechPiece(joiner.add(f" {word}"), language))
    end = SpeechPiece("", language)
    yield Output([], finish="stop", finished=True, cached_tokens=0, speech=end)


def _words(spec: SpeechSpec, first: int, last: int) -> Iterator[str]:
    """Yields a word for each second that has a sound, or has begun to."""
    for at in range(first, last, spec.rate):
        heard = spec.samples[at : min(at + spec.rate, last)]
        if not sound.is_silent(heard):
            yield WORDS[zlib.crc32(heard.tobytes()) % len(WORDS)]


def _segments(words: Sequence[str], offset: float, seconds: float) -> Iterator[SpeechSegment]:
    for at in range(0, len(words), WORDS_PER_SEGMENT):
        some = words[at : at + WORDS_PER_SEGMENT]
        end = min(float(at + len(some)), seconds)
        ids = [_token(word) for word in some]
        yield SpeechSegment(offset + at, offset + end, " " + " ".join(some), ids, -0.5, offset)


def _token(word: str) -> int:
    return 10 + WORDS.index(word)
