"""The types of a streamed answer: the events that a server sends, and the record kept of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class StreamChoice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    def only_announces(self) -> bool:
        """Return whether this event only names the role, as some servers send before the first token."""
        delta = self.delta
        return (
            delta is not None
            and delta.role is not None
            and not (delta.content or delta.reasoning_content or delta.tool_calls or self.finish_reason)
        )

    def added(self) -> str:
        """Return the text that this event adds to the answer."""
        return self.text or (self.delta.content if self.delta else None) or ""


class Chunk(msgspec.Struct, gc=False):
    choices: list[StreamChoice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


class Answer(msgspec.Struct, gc=False):
    """The record of one request. Times are of the monotonic clock, which all processes share."""

    sent: float
    first: float = 0.0
    """The time of the first token; 0 if none arrived."""
    last: float = 0.0
    ended: float = 0.0
    gaps: bytes = b""
    """Seconds between events that carry a token, as 32-bit floats."""
    events: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""
    aborted: bool = False
    """The client ended the request before the answer was complete."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class StageAnswers:
    """All answers of one stage."""

    name: str
    begun: float
    seconds: float
    answers: list[Answer]
