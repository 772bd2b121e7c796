"""Bodies of transcriptions: what is accepted, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm import wire_transcription
from dynamo_vllm.errors import InvalidRequest


def test_fields_that_are_left_out_have_defaults() -> None:
    body = wire_transcription.parse({"_api": "transcription", "file": "AAAA"})
    assert (body.task, body.response_format) == ("transcribe", "json")
    assert (body.stream, body.is_timed) == (False, False)


def test_file_lives_only_in_the_body() -> None:
    raw = {"file": "AAAA"}
    assert wire_transcription.parse(raw).file == "AAAA"
    assert raw == {}


def test_formats_with_times_need_segments() -> None:
    for format in ("srt", "vtt", "verbose_json"):
        assert wire_transcription.parse({"file": "AAAA", "response_format": format}).is_timed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "sing"),
        ("response_format", "xml"),
        ("timestamp_granularities", ["word"]),
        ("timestamp_granularities", ["letter"]),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("seed", 2**64),
        ("max_completion_tokens", 0),
        ("prompt", "a" * (1 << 17)),
        ("file", 3),
        ("stream", "yes"),
    ],
)
def test_refusals_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire_transcription.parse({"file": "AAAA", field: value})
    assert str(caught.value).startswith(f"{field}: ")
    with pytest.raises(InvalidRequest):
        wire_transcription.parse([1])
