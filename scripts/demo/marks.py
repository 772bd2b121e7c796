"""Marks which ids of a conversation a model is to say: the assistant's turns with their end."""

from __future__ import annotations

from tokenizers import Tokenizer

from demo.generator.base import Example
from demo.tokenizer import TURN_END


class Marker:
    """Finds the assistant's turns among token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.opening = tokenizer.encode("<|im_start|>assistant\n").ids
        self.empty_thought = tokenizer.encode("<think></think>").ids
        (self.end,) = tokenizer.encode(TURN_END).ids

    def mark(self, example: Example, ids: list[int]) -> list[int]:
        """1 for each id that is learnt, 0 for the others."""
        learnt, at, size = [0] * len(ids), 0, len(self.opening)
        for turn in example.turns:
            if turn.role != "assistant":
                continue
            while ids[at : at + size] != self.opening:
                at = ids.index(self.opening[0], at + 1)
            start = at + size
            stop = ids.index(self.end, start) + 1
            if turn.thought is None:  # the prompt has the empty block already
                start += len(self.empty_thought)
            learnt[start:stop] = [1] * (stop - start)
            at = stop
        return learnt
