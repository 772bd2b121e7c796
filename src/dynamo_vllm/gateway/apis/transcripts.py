"""Writes a transcript in the formats of OpenAI's API. Pure: what a worker said in, text out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

JSON, TEXT, SRT, VTT, VERBOSE = "json", "text", "srt", "vtt", "verbose_json"
STREAMED = (JSON, TEXT)
"""Formats of which a client may get the pieces as they come."""
END = b"data: [DONE]\n\n"


class Segment(msgspec.Struct):
    """A part of the speech."""

    id: int
    start: float
    end: float
    text: str
    seek: int = 0
    tokens: list[int] = []
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_prob: float | None = None
    """As in vLLM, whose engine does not give it."""


class Word(msgspec.Struct):
    word: str
    start: float
    end: float


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's words for it."""
        return {
            "type": "tokens",
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }


class Ending(msgspec.Struct):
    """The last chunk of a worker."""

    done: bool
    language: str | None = None
    duration: float = 0.0
    segments: list[Segment] | None = None
    words: list[Word] | None = None
    usage: Usage = msgspec.field(default_factory=Usage)


class Transcript(msgspec.Struct):
    """A whole answer."""

    text: str
    ending: Ending
    task: str = "transcribe"
    wants: tuple[str, ...] = ("segment",)
    """Timestamps of which parts the client asked for."""


def as_json(made: Transcript) -> bytes:
    return msgspec.json.encode({"text": made.text, "usage": made.ending.usage.shown()})


def as_text(made: Transcript) -> bytes:
    return f"{made.text}\n".encode()


def as_verbose_json(made: Transcript) -> bytes:
    ending = made.ending
    found: dict[str, Any] = {
        "task": made.task,
        "language": ending.language or "unknown",
        "duration": ending.duration,
        "text": made.text,
    }
    if "segment" in made.wants:
        found["segments"] = ending.segments or []
    if "word" in made.wants:
        found["words"] = ending.words or []
    seconds = int(-(-ending.duration // 1))
    return msgspec.json.encode({**found, "usage": {**ending.usage.shown(), "seconds": seconds}})


def as_srt(made: Transcript) -> bytes:
    blocks = [
        f"{number}\n{clock(one.start, ',')} --> {clock(one.end, ',')}\n{cue(one.text)}\n"
        for number, one in enumerate(made.ending.segments or (), 1)
    ]
    return "".join(f"{block}\n" for block in blocks).encode()


def as_vtt(made: Transcript) -> bytes:
    blocks = [
        f"{clock(one.start, '.')} --> {clock(one.end, '.')}\n{cue(one.text, escapes=True)}\n"
        for one in made.ending.segments or ()
    ]
    return ("WEBVTT\n\n" + "".join(f"{block}\n" for block in blocks)).encode()


FORMATS: Mapping[str, tuple[Callable[[Transcript], bytes], str]] = {
    JSON: (as_json, "application/json"),
    TEXT: (as_text, "text/plain; charset=utf-8"),
    SRT: (as_srt, "text/plain; charset=utf-8"),
    VTT: (as_vtt, "text/vtt; charset=utf-8"),
    VERBOSE: (as_verbose_json, "application/json"),
}
"""By the name of the format: what writes it, and its content type."""


def clock(seconds: float, point: str) -> str:
    """Return hours:minutes:seconds and milliseconds, as subtitles have them."""
    whole = round(max(0.0, seconds) * 1000)
    minutes, milliseconds = divmod(whole, 60_000)
    return (
        f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"
    )


def cue(text: str, *, escapes: bool = False) -> str:
    """Return a text without what would end a cue: an empty line, or an arrow."""
    lines = [line.strip() for line in text.splitlines()]
    found = "\n".join(line for line in lines if line)
    if escapes:
        return found.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return found.replace("-->", "->")


def delta_event(text: str) -> bytes:
    return _event({"type": "transcript.text.delta", "delta": text})


def done_event(made: Transcript) -> bytes:
    usage = made.ending.usage.shown()
    return _event({"type": "transcript.text.done", "text": made.text, "usage": usage})


def error_event(body: bytes) -> bytes:
    """Return an error in the shape of OpenAI's, for an answer that has begun."""
    return b"data: " + body + b"\n\n"


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
