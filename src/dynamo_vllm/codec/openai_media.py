"""Turns engine outputs with images into OpenAI's format."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_vllm.job import MediaFile, Output
    from dynamo_vllm.wire import Chunk


class ImagesEncoder:
    """A chunk of /v1/images/generations per output; the frontend combines the images of all."""

    def __init__(self, wants_url: bool, size: str | None, format: str) -> None:
        self._wants_url = wants_url
        self._head: Chunk = {"created": int(time.time()), "output_format": format}
        if size is not None:
            self._head["size"] = size
        self._text = ""

    def encode(self, output: Output) -> Chunk:
        """Text comes from a stage that rewrites the prompt."""
        self._text += output.text or ""
        return {**self._head, "data": [self._image(media) for media in output.media]}

    def _image(self, media: MediaFile) -> dict[str, Any]:
        made = {"url": data_url(media)} if self._wants_url else {"b64_json": to_base64(media)}
        return {**made, "revised_prompt": self._text} if self._text else made


class FilesEncoder:
    """A chunk of /v1/videos or /v1/audio/speech per output; the frontend combines them into one answer."""

    def __init__(self, kind: str, job_id: str, model: str, wants_url: bool, format: str) -> None:
        self._wants_url = wants_url
        self._format = format
        self._head: Chunk = {
            "id": f"{kind}-{job_id}",
            "object": "video" if kind == "video" else "audio.speech",
            "model": model,
            "status": "completed",
            "progress": 100,
            "created": int(time.time()),
        }

    def encode(self, output: Output) -> Chunk:
        return {**self._head, "data": [self._file(media) for media in output.media]}

    def _file(self, media: MediaFile) -> dict[str, object]:
        made = {"url": data_url(media)} if self._wants_url else {"b64_json": to_base64(media)}
        return {"output_format": self._format, **made}


class MediaChatEncoder:
    """Chat chunks: text and media as parts of one content.

    The frontend's unary answer keeps the parts and drops text that came before them in the same choice, so
    text waits for the end.
    """

    def __init__(self, job_id: str, model: str, prompt_tokens: int) -> None:
        self._head: Chunk = {
            "id": f"chatcmpl-{job_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._prompt = prompt_tokens
        self._completion = 0
        self._text = ""
        self._is_first = True

    def encode(self, output: Output) -> Chunk:
        self._text += output.text or ""
        self._completion += len(output.token_ids)
        delta: dict[str, object] = {"content": self._content(output)}
        if self._is_first:
            delta["role"], self._is_first = "assistant", False
        chunk: Chunk = {
            **self._head,
            "choices": [{"index": 0, "delta": delta, "finish_reason": "stop" if output.finished else None}],
        }
        if output.finished:
            chunk["usage"] = {
                "prompt_tokens": self._prompt,
                "completion_tokens": self._completion,
                "total_tokens": self._prompt + self._completion,
            }
        return chunk

    def _content(self, output: Output) -> str | list[dict[str, Any]]:
        if not output.media:
            return ""
        text = [{"type": "text", "text": self._text}] if self._text else []
        self._text = ""
        return [*text, *(part(media) for media in output.media)]


def part(media: MediaFile) -> dict[str, object]:
    """image_url, audio_url or video_url."""
    kind = f"{media.kind}_url"
    return {"type": kind, kind: {"url": data_url(media)}}


def data_url(media: MediaFile) -> str:
    return f"data:{media.type};base64,{to_base64(media)}"


def to_base64(media: MediaFile) -> str:
    return base64.b64encode(media.content).decode()
