"""Asks workers to convert between text and tokens."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dynamo_vllm.serving.calls.directory import failure

if TYPE_CHECKING:
    from dynamo_vllm.serving.calls.directory import Directory, Reply

ANSWER_SECONDS = 30.0


class TokenWorkers:
    """The workers of a directory, which is open, that convert tokens."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._numbers = itertools.count()

    async def convert(self, operation: str, model: str | None, body: dict[str, Any]) -> Reply:
        """Return {"status", "body"} or {"status", "message", "parameter"}, as in HTTP."""
        having = await self._directory.having(model)
        found = [card for card in having if card.converts]
        if model is None and len({card.models for card in found}) > 1:
            return failure(400, "there are several models; name one", "model")
        first = next(self._numbers)
        for number in range(min(2, len(found))):
            worker = found[(first + number) % len(found)]
            reply = await self._directory.ask(worker.instance, operation, body, ANSWER_SECONDS)
            if reply["status"] not in (502, 503):
                return reply
        if found:
            return reply
        if having:
            return failure(400, f"the model {model!r} has no tokenizer", "model")
        if self._directory.is_empty:
            return failure(503, "no worker is there that has a tokenizer")
        return failure(404, f"the model {model!r} does not exist", "model")
