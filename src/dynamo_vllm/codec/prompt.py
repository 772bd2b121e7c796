"""Checks on a tokenised prompt before it reaches an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.codec.sampling import check_vocabulary
from dynamo_vllm.errors import InvalidRequest, TooLong

if TYPE_CHECKING:
    from collections.abc import Sequence


def room_after(prompt: Sequence[int], context_length: int) -> int:
    """Return how many tokens fit after the prompt; at least one must."""
    if not prompt:
        raise InvalidRequest("the prompt is empty", parameter="prompt")
    room = context_length - len(prompt)
    if room < 1:
        raise TooLong(
            f"prompt has {len(prompt)} tokens; this model takes {context_length} with the answer",
            parameter="prompt",
        )
    return room


def check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    check_vocabulary("prompt", prompt, vocab_size)
