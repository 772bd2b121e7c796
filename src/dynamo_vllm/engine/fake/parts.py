"""Tokenises text and processes media for the fake engine, without a model."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.base import EngineParts, FrameChooser
from dynamo_vllm.engine.fake.pooling import FakePrompts
from dynamo_vllm.job import MediaPrompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynamo_vllm.engine.base import Speech
    from dynamo_vllm.engine.fake.spec import FakeSpec
    from dynamo_vllm.job import Media

PROCESSED_BYTES = 1000
"""The size that it reports for each processed media item; no memory is really used."""


def of(spec: FakeSpec) -> EngineParts:
    """Returns the parts of a fake engine; it does not support prompt embeddings."""
    return EngineParts(
        renderer=FakeRenderer(spec.vocab_size),
        tokens=FakeTokens(spec.vocab_size),
        media=FakeMedia(spec.media) if spec.media else None,
        encoded=FakeEncoded(),
        pooling=FakePrompts(spec.vocab_size) if spec.pooling else None,
        speech=_speech(spec) if spec.transcription else None,
    )


def _speech(spec: FakeSpec) -> Speech:
    from dynamo_vllm.engine.fake.speech import FakeSpeech  # which imports numpy

    return FakeSpeech(spec.vocab_size, spec.context_length, spec.window_seconds)


class FakeRenderer:
    """Makes one token of each character."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    async def render_text(self, prompt: str) -> list[int]:
        return [ord(char) % self._vocab_size for char in prompt]

    async def render_chat(self, messages: object, options: object) -> list[int]:
        return await self.render_text(str(messages))

    def answer_parser(self, body: object, template_kwargs: object) -> None:
        return None


class FakeTokens:
    """Makes one token of each character, and the character of each token."""

    def __init__(self, vocab_size: int) -> None:
        self._renderer = FakeRenderer(vocab_size)

    async def of_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + await self._renderer.render_text(text)

    async def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        *,
        add_special_tokens: bool,
    ) -> list[int]:
        text = "".join(str(message.get("content")) for message in messages)
        return await self.of_text(text, add_special_tokens=add_special_tokens)

    async def text(self, ids: Sequence[int]) -> str:
        return "".join(self.strings(ids))

    def strings(self, ids: Sequence[int]) -> list[str]:
        return [chr(i) for i in ids]


class FakeMedia:
    """Puts three tokens for each media item before the prompt."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._kinds = tuple(kinds)

    def frame_chooser(self) -> FrameChooser | None:
        return None

    def placeholders(self) -> dict[str, list[int]]:
        return {kind: [1] for kind in self._kinds}

    async def process(self, prompt: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        # The tokens depend on the names, so that other media get other answers.
        tokens = [10 + byte for item in media for byte in hashlib.sha256(item.name.encode()).digest()[:3]]
        return MediaPrompt([*tokens, *prompt], prompt, media, None, PROCESSED_BYTES * len(media))


class FakeEncoded:
    """Reads no encoder output: `FakeMedia.process` uses only names."""

    async def read(self, name: str) -> object:
        return f"encoded {name}"
