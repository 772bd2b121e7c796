"""Ends a guided request in the engine core if its grammar takes too long for one token.

What is wrong: a guide of 28 bytes, `(((a{0,9}){0,9}){0,9}){0,9}`, compiles in a millisecond. But in each
engine step vLLM 0.30 asks the grammar which tokens may follow, and xgrammar takes longer with every token:
after 40 tokens half a second each, during which no other stream gets a token.

What we do: `walk` finds most of these guides in the guide checker, before they reach the engine. If a grammar
becomes slow later, it rejects the next token, and vLLM then ends only this request.

It can go when vLLM limits the time of a grammar step, or xgrammar takes the same time for every token.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import T, Where, in_vllm, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

STEP_SECONDS = 0.1
"""The CPU time for one token of one request. A usual guide takes less than a thousandth of it."""
WALK_STEPS = 64
_SLOW = "dynamo_vllm_is_slow"
_SLOWER_AND_SLOWER, _PROBED_TOKENS = "(((a{0,9}){0,9}){0,9}){0,9}", 30


class TooSlow(Exception):
    """Is raised if a guide takes the engine too long for each token."""


def apply() -> None:
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    for grammar in (XgrammarGrammar, GuidanceGrammar):
        wrap(grammar, "fill_bitmask", _timed)
        wrap(grammar, "validate_tokens", _timed)
        wrap(grammar, "accept_tokens", _timed_unless_slow)


def still_needed() -> bool:
    """Returns whether xgrammar takes longer with every token; as a ratio, because machines differ."""
    import xgrammar

    about = xgrammar.TokenizerInfo(["a", "<end>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[1])
    compiled = xgrammar.GrammarCompiler(about, max_threads=1).compile_regex(_SLOWER_AND_SLOWER)
    matcher, seconds = xgrammar.GrammarMatcher(compiled), []
    for _ in range(_PROBED_TOKENS):
        began = time.thread_time()
        matcher.accept_token(0)
        seconds.append(time.thread_time() - began)
    return max(seconds[-5:]) > 10 * min(seconds[:5])


def _timed(act: Callable[..., T]) -> Callable[..., T]:
    def timed(grammar: StructuredOutputGrammar, *args: object) -> T:
        began = time.thread_time()
        result = act(grammar, *args)
        if time.thread_time() - began > STEP_SECONDS:
            setattr(grammar, _SLOW, True)
        return result

    return timed


def _timed_unless_slow(accept: Callable[..., bool]) -> Callable[..., bool]:
    return _unless_slow(_timed(accept))


def _unless_slow(accept: Callable[..., bool]) -> Callable[..., bool]:
    def accepted(grammar: StructuredOutputGrammar, request_id: str, tokens: list[int]) -> bool:
        return not getattr(grammar, _SLOW, False) and accept(grammar, request_id, tokens)

    return accepted


def walk(grammar: StructuredOutputGrammar, bitmask: torch.Tensor, end_token: int | None) -> None:
    """Walks through a grammar along tokens that it allows. Raises TooSlow."""
    for number in range(1, WALK_STEPS + 1):
        began = time.thread_time()
        grammar.fill_bitmask(bitmask, 0)
        token = _allowed(bitmask, end_token, number)
        goes_on = token is not None and grammar.accept_tokens("walk", [token])
        if time.thread_time() - began > STEP_SECONDS:
            raise TooSlow(
                f"takes the engine more than {STEP_SECONDS:g} s for each token; use fewer repetitions "
                "inside repetitions, and alternatives that begin differently"
            )
        if not goes_on or grammar.is_terminated():
            return


def _allowed(bitmask: torch.Tensor, end_token: int | None, number: int) -> int | None:
    """Returns an allowed token, a different one in each step; None if only the end token is allowed."""
    import numpy as np

    words = bitmask[0].numpy().view(np.uint8)
    ids = np.flatnonzero(np.unpackbits(words, bitorder="little"))
    ids = ids[ids != end_token] if end_token is not None else ids
    return int(ids[number * 7919 % len(ids)]) if len(ids) else None


PATCHES = (
    in_vllm(
        name="grammar-steps",
        targets=tuple(
            f"vllm.v1.structured_output.{grammar}.{name}"
            for grammar in ("backend_xgrammar.XgrammarGrammar", "backend_guidance.GuidanceGrammar")
            for name in ("fill_bitmask", "validate_tokens", "accept_tokens")
        ),
        defect="a small guide can make every step of the engine slower than the one before",
        where=(Where.ENGINE,),
        apply=apply,
        still_needed=still_needed,
    ),
)
