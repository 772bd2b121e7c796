"""Ends a guided request in the engine core whose guide takes too long for a single token.

A guide of 28 bytes, `(((a{0,9}){0,9}){0,9}){0,9}`, is compiled in a millisecond. Then vLLM 0.30 asks it in
each step of the engine which tokens may follow, and that takes xgrammar longer from token to token: half a
second each after 40, in which no other stream gets a token. `walk` finds most of them beforehand, in a judge.
What becomes slow later ends here, with the first step that is: vLLM ends a request whose tokens its grammar
does not accept, and that one alone.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_SECONDS = 0.1
"""Of processor time, for one token of one request. A usual guide takes less than a thousandth of it."""
WALK_STEPS = 64
_SLOW = "dynamo_vllm_is_slow"
_MENDED = "dynamo_vllm_mended"


class TooSlow(Exception):
    """The guide takes the engine too long for each token."""


def mend() -> None:
    """Once in each process; what is forked from it has it too."""
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    for grammar in (XgrammarGrammar, GuidanceGrammar):
        if not hasattr(grammar, _MENDED):
            setattr(grammar, _MENDED, True)
            grammar.fill_bitmask = _timed(grammar.fill_bitmask)
            grammar.validate_tokens = _timed(grammar.validate_tokens)
            grammar.accept_tokens = _unless_slow(_timed(grammar.accept_tokens))


def _timed(act: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(act)
    def timed(grammar: Any, *args: Any) -> Any:
        began = time.thread_time()
        result = act(grammar, *args)
        if time.thread_time() - began > STEP_SECONDS:
            setattr(grammar, _SLOW, True)
        return result

    return timed


def _unless_slow(accept: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(accept)
    def accepted(grammar: Any, request_id: str, tokens: list[int]) -> bool:
        return not getattr(grammar, _SLOW, False) and accept(grammar, request_id, tokens)

    return accepted


def walk(grammar: Any, bitmask: Any, end_token: int | None) -> None:
    """Take one way through a guide, of any tokens that it allows. Raises TooSlow."""
    for number in range(1, WALK_STEPS + 1):
        began = time.thread_time()
        grammar.fill_bitmask(bitmask, 0)
        token = _allowed(bitmask, end_token, number)
        goes_on = token is not None and grammar.accept_tokens("walk", [token])
        if time.thread_time() - began > STEP_SECONDS:
            raise TooSlow(
                f"takes the engine more than {STEP_SECONDS:g} s for each token; use fewer repetitions "
                "inside of repetitions, and alternatives that begin differently"
            )
        if not goes_on or grammar.is_terminated():
            return


def _allowed(bitmask: Any, end_token: int | None, number: int) -> int | None:
    """One of the tokens that may follow, another one in each step; None where only the end may."""
    import numpy as np

    words = bitmask[0].numpy().view(np.uint8)
    ids = np.flatnonzero(np.unpackbits(words, bitorder="little"))
    ids = ids[ids != end_token] if end_token is not None else ids
    return int(ids[number * 7919 % len(ids)]) if len(ids) else None
