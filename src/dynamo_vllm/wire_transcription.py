"""The body of /v1/audio/transcriptions and /v1/audio/translations, as the gateway sends it to a worker."""

from __future__ import annotations

import msgspec

from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.wire import describe

TRANSCRIBE, TRANSLATE = "transcribe", "translate"
FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
TIMED = ("srt", "vtt", "verbose_json")
"""Formats that need segments with their times."""
WORD = "word"
MAX_HINT = 1 << 16
"""Characters of `prompt`. A model reads a few hundred tokens of it."""


class SpeechBody(msgspec.Struct, kw_only=True):
    """A sound and what to make of it. Not frozen: the file's text is dropped once it is decoded."""

    model: str | None = None
    task: str = TRANSCRIBE
    file: str = ""
    """In base64."""
    filename: str | None = None
    """What the client calls it; the bytes decide what it is."""
    language: str | None = None
    to_language: str | None = None
    prompt: str | None = None
    temperature: float | None = None
    response_format: str = "json"
    timestamp_granularities: list[str] | None = None
    stream: bool = False
    seed: int | None = None
    max_completion_tokens: int | None = None
    priority: int = 0
    is_health_check: bool = msgspec.field(default=False, name="_HEALTH_CHECK")

    @property
    def is_timed(self) -> bool:
        """Whether the answer has segments."""
        return self.response_format in TIMED


def parse(raw: object) -> SpeechBody:
    """Return the body, and take the file out of `raw`, which lives as long as the request."""
    if not isinstance(raw, dict):
        raise InvalidRequest("the body is not an object")
    try:
        body = msgspec.convert(raw, SpeechBody)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(describe(exc)) from None
    if not body.is_health_check:
        raw.pop("file", None)
    _check(body)
    return body


def _check(body: SpeechBody) -> None:
    if body.task not in (TRANSCRIBE, TRANSLATE):
        raise InvalidRequest(f"{body.task!r} is unknown; use transcribe or translate", parameter="task")
    if body.response_format not in FORMATS:
        raise InvalidRequest(
            f"{body.response_format!r} is unknown; use one of {', '.join(FORMATS)}",
            parameter="response_format",
        )
    for one in body.timestamp_granularities or ():
        if one == WORD:
            raise InvalidRequest(
                "this worker has times of segments, not of words", parameter="timestamp_granularities"
            )
        if one != "segment":
            raise InvalidRequest(f"{one!r} is unknown; use segment", parameter="timestamp_granularities")
    if body.temperature is not None and not 0.0 <= body.temperature <= 2.0:
        raise InvalidRequest(f"{body.temperature} is not 0 to 2", parameter="temperature")
    if body.seed is not None and not -(2**63) <= body.seed < 2**63:
        raise InvalidRequest("is not a 64-bit number", parameter="seed")
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise InvalidRequest("is not 1 or more", parameter="max_completion_tokens")
    if body.prompt is not None and len(body.prompt) > MAX_HINT:
        raise InvalidRequest(f"has more than {MAX_HINT} characters", parameter="prompt")
