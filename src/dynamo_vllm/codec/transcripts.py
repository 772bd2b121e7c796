"""From a speech model's tokens to a transcript: joins texts, finds segments, writes chunks."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_vllm.job import Job, Output, SpeechSegment, SpeechSpec
    from dynamo_vllm.wire import Chunk

TICK = 0.02
"""Seconds from one timestamp token to the next."""
UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue", "bo", "km"})
"""Languages that are written without blanks between words."""


class Joiner:
    """Joins the texts of windows: one blank between two of them, none at the ends."""

    def __init__(self, language: str) -> None:
        self._blank = "" if language in UNSPACED else " "
        self._pending = ""
        """Goes before the next text."""
        self._is_window_empty = True
        self._is_empty = True

    def begin_window(self) -> None:
        self._pending, self._is_window_empty = "", True

    def add(self, text: str) -> str:
        """Return what can be sent of it: blanks wait for what follows them."""
        if self._is_window_empty:
            text = text.lstrip()
            if not text:
                return ""
            self._pending = "" if self._is_empty else self._blank
            self._is_window_empty = self._is_empty = False
        words = text.rstrip()
        if not words:
            self._pending += text
            return ""
        made, self._pending = self._pending + words, text[len(words) :]
        return made


@dataclass(frozen=True, slots=True)
class Span:
    """Some tokens between two timestamps, which count in ticks from the window's beginning."""

    start: int
    end: int
    places: range
    """Where its tokens are among those of the window."""


def spans(ids: Sequence[int], first_timestamp: int, ticks: int) -> Iterator[Span]:
    """Yield the segments of a window of this length, whose timestamp tokens begin with this one.

    No rule holds the model to a form: a text may lack its end, times may go back or beyond the window.
    """
    start, begun = 0, None
    for place, token in enumerate(ids):
        if token < first_timestamp:
            begun = place if begun is None else begun
            continue
        at = min(max(token - first_timestamp, start), ticks)
        if begun is not None:
            yield Span(start, at, range(begun, place))
            begun = None
        start = at
    if begun is not None:
        yield Span(start, ticks, range(begun, len(ids)))


class TranscriptEncoder:
    """Pieces of the text, then one chunk with everything else."""

    def __init__(self, job: Job, spec: SpeechSpec) -> None:
        # Nothing that holds the sound: it would live until the next garbage collection.
        self._is_timed = spec.timestamps
        self._seconds = len(spec.samples) / spec.rate
        self._sound_tokens = spec.sound_tokens
        self._prompt_tokens = job.prompt_tokens
        self._temperature = job.sampling.temperature or 0.0
        self._tokens = 0
        self._segments: list[dict[str, object]] = []

    def encode(self, output: Output) -> Chunk:
        self._tokens += len(output.token_ids)
        piece = output.speech
        if piece is None:
            return {"text": ""}
        for segment in piece.segments:
            self._segments.append(self._segment(len(self._segments), segment))
        if not output.finished:
            return {"text": piece.text}
        return {
            "done": True,
            "text": piece.text,
            "language": piece.language,
            "duration": round(self._seconds, 3),
            "segments": self._segments if self._is_timed else None,
            "words": None,
            "usage": self._usage(),
        }

    def _segment(self, number: int, segment: SpeechSegment) -> dict[str, object]:
        return {
            "id": number,
            "seek": round(segment.offset * 100),  # in frames of the spectrum, as in Whisper
            "start": round(segment.start, 2),
            "end": round(segment.end, 2),
            "text": segment.text,
            "tokens": list(segment.token_ids),
            "temperature": self._temperature,
            "avg_logprob": round(segment.mean_logprob, 4),
            "compression_ratio": round(compression_ratio(segment.text), 4),
            "no_speech_prob": None,  # vLLM does not give it
        }

    def _usage(self) -> dict[str, object]:
        sound, prompt = self._sound_tokens, self._prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
            "prompt_tokens_details": {"audio_tokens": sound, "text_tokens": prompt - sound},
            "seconds": math.ceil(self._seconds),
        }


def compression_ratio(text: str) -> float:
    """Return how much smaller compression makes a text: much for one that repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
