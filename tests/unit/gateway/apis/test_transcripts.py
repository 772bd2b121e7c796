"""A transcript in each of the formats."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from dynamo_vllm.gateway.apis import transcripts
from dynamo_vllm.gateway.apis.transcripts import FORMATS, Ending, Transcript, clock, cue

SAID: dict[str, Any] = {
    "done": True,
    "language": "en",
    "duration": 3661.2504,
    "segments": [
        {"id": 0, "start": 0.0, "end": 1.5, "text": " Hello,"},
        {"id": 1, "start": 3600.0, "end": 3661.2504, "text": " <world>\n\n--> now "},
    ],
    "words": [{"word": "Hello", "start": 0.0, "end": 1.0}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}


def made(**more: Any) -> Transcript:
    return Transcript("Hello, <world> now", msgspec.convert(SAID | more, Ending), wants=("segment", "word"))


def test_json_has_text_and_tokens() -> None:
    assert json.loads(transcripts.as_json(made())) == {
        "text": "Hello, <world> now",
        "usage": {"type": "tokens", "input_tokens": 3, "output_tokens": 4, "total_tokens": 7},
    }


def test_text_and_subtitles() -> None:
    assert transcripts.as_text(made()) == b"Hello, <world> now\n"
    assert transcripts.as_srt(made()).decode() == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello,\n\n2\n01:00:00,000 --> 01:01:01,250\n<world>\n-> now\n\n"
    )

    assert transcripts.as_vtt(made()).decode() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello,\n\n"
        "01:00:00.000 --> 01:01:01.250\n&lt;world&gt;\n--&gt; now\n\n"
    )


def test_verbose_json_has_what_was_asked_for() -> None:
    whole = json.loads(transcripts.as_verbose_json(made()))
    assert (whole["language"], whole["duration"], whole["usage"]["seconds"]) == ("en", 3661.2504, 3662)
    assert [one["text"] for one in whole["segments"]] == [" Hello,", " <world>\n\n--> now "]
    assert whole["words"] == SAID["words"]
    only = msgspec.structs.replace(made(), wants=("word",))
    assert "segments" not in json.loads(transcripts.as_verbose_json(only))


def test_silence_has_every_format() -> None:
    silent = Transcript("", Ending(done=True))
    assert all(isinstance(write(silent), bytes) for write, _ in FORMATS.values())


def test_clock_rounds_up_to_the_next_minute_and_a_cue_has_no_empty_lines() -> None:
    assert clock(59.9996, ".") == "00:01:00.000"
    assert clock(-1.0, ",") == "00:00:00,000"
    assert clock(360000.0, ",") == "100:00:00,000"
    assert cue(" a \r\n\r\n\n b ") == "a\nb"


def test_events_are_those_of_openai() -> None:
    delta = {"type": "transcript.text.delta", "delta": "Hel"}
    assert transcripts.delta_event("Hel") == b"data: " + msgspec.json.encode(delta) + b"\n\n"
    done = {"type": "transcript.text.done", **json.loads(transcripts.as_json(made()))}
    assert json.loads(transcripts.done_event(made()).removeprefix(b"data: ")) == done
