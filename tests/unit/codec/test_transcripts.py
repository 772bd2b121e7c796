"""Transcripts: texts of windows joined, segments from tokens, chunks."""

from __future__ import annotations

import pytest

from dynamo_vllm.codec.transcripts import Joiner, Span, TranscriptEncoder, compression_ratio, spans
from dynamo_vllm.job import Job, Output, SamplingSpec, SpeechPiece, SpeechSegment, SpeechSpec

BASE = 100


@pytest.mark.parametrize(
    ("language", "windows", "whole"),
    [
        ("en", [[" one", " two"], [" three"]], "one two three"),
        ("en", [["one", " ", "two "], ["  three  "], [" "], [], ["four"]], "one two three four"),
        ("ja", [["一", "二"], [" 三"]], "一二三"),
        ("en", [[""], [" "]], ""),
        ("en", [[" one", "\n", " two"]], "one\n two"),
    ],
)
def test_pieces_make_up_the_text(language: str, windows: list[list[str]], whole: str) -> None:
    joiner, made = Joiner(language), ""
    for texts in windows:
        joiner.begin_window()
        for text in texts:
            made += joiner.add(text)
    assert made == whole


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([], []),
        ([BASE + 5], []),
        ([1, 2, BASE + 50], [(0, 50, [0, 1])]),
        ([1, BASE + 10, BASE + 20, 2, BASE + 30], [(0, 10, [0]), (20, 30, [3])]),
        ([1, BASE + 10, BASE + 20, 2], [(0, 10, [0]), (20, 500, [3])]),
        ([1, BASE + 10, 2, BASE + 5], [(0, 10, [0]), (10, 10, [2])]),
        ([1, BASE + 9000], [(0, 500, [0])]),
        ([1, 2], [(0, 500, [0, 1])]),
    ],
)
def test_segments_of_any_tokens(ids: list[int], found: list[tuple[int, int, list[int]]]) -> None:
    assert [*spans(ids, BASE, 500)] == [
        Span(start, end, range(places[0], places[-1] + 1)) for start, end, places in found
    ]


def encoder_of(*, timestamps: bool) -> TranscriptEncoder:
    spec = SpeechSpec(samples=[0.0] * 25, rate=10, windows=[(0, 25)], sound_tokens=125, timestamps=timestamps)
    job = Job("job", [1, 2, 3, 4], SamplingSpec(max_tokens=9, temperature=0.4), speech=spec)
    made = TranscriptEncoder(job, spec)
    spec.drop_sound()
    return made


def test_last_chunk_has_segments_and_usage() -> None:
    encoder = encoder_of(timestamps=True)
    segment = SpeechSegment(0.5, 1.25, " one two", [7, 8], -0.25, 0.0)
    first = encoder.encode(Output([7, 8], speech=SpeechPiece("one two", "en", [segment])))
    last = encoder.encode(Output([9], finish="stop", finished=True, speech=SpeechPiece("", "en")))
    assert first == {"text": "one two"}
    place = {"id": 0, "seek": 0, "start": 0.5, "end": 1.25, "text": " one two", "tokens": [7, 8]}
    quality = {"temperature": 0.4, "avg_logprob": -0.25, "compression_ratio": 0.5, "no_speech_prob": None}
    usage = {"prompt_tokens": 129, "completion_tokens": 3, "total_tokens": 132, "seconds": 3}
    details = {"audio_tokens": 125, "text_tokens": 4}
    assert last == {
        **{"done": True, "text": "", "language": "en", "duration": 2.5, "words": None},
        "segments": [{**place, **quality}],
        "usage": {**usage, "prompt_tokens_details": details},
    }


def test_answer_without_timestamps_has_no_segments() -> None:
    last = encoder_of(timestamps=False).encode(Output([], finished=True, speech=SpeechPiece("", "en")))
    assert last["segments"] is None


def test_repeated_text_is_compressed_more() -> None:
    assert compression_ratio("the same again " * 20) > 3 > compression_ratio("something else now")
