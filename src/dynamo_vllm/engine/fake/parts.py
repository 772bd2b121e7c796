"""What the fake engine makes of texts and media, without looking at them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from dynamo_vllm.engine.base import EngineParts, FrameChooser
from dynamo_vllm.job import MediaPrompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynamo_vllm.engine.fake.spec import FakeSpec
    from dynamo_vllm.job import Media

SEEN_BYTES = 1000
"""Of each medium, in what it makes of a prompt: a number to count with, no memory."""


def of(spec: FakeSpec) -> EngineParts:
    """It takes no vectors."""
    return EngineParts(
        renderer=FakeRenderer(spec.vocab_size),
        media=FakeMedia(spec.media) if spec.media else None,
        encoded=FakeEncoded(),
    )


class FakeRenderer:
    """One token for each character."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    async def render_text(self, prompt: str) -> list[int]:
        return [ord(char) % self._vocab_size for char in prompt]

    async def render_chat(self, messages: object, options: object) -> list[int]:
        return await self.render_text(str(messages))

    def answer_parser(self, body: object, template_kwargs: object) -> None:
        return None


class FakeMedia:
    """Three tokens for each medium, before the prompt."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._kinds = tuple(kinds)

    def frame_chooser(self) -> FrameChooser | None:
        return None

    def placeholders(self) -> dict[str, list[int]]:
        return {kind: [1] for kind in self._kinds}

    async def process(self, prompt: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        # Ids of the names, so that other media have other answers.
        places = [10 + byte for medium in media for byte in hashlib.sha256(medium.name.encode()).digest()[:3]]
        return MediaPrompt([*places, *prompt], prompt, media, None, SEEN_BYTES * len(media))


class FakeEncoded:
    """Reads nothing: `see` looks at names only."""

    async def read(self, name: str) -> object:
        return f"encoded {name}"
