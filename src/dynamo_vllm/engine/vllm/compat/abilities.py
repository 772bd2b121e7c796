"""Knows what the installed vLLM can do and an older one cannot. Imports no vLLM."""

from __future__ import annotations

from dynamo_vllm.engine.vllm.compat import versions

_DRAFTING = frozenset({"draft_model", "eagle", "eagle3", "mtp"})


def speculative_methods_on_cpu() -> frozenset[str]:
    """Return the methods of speculative decoding that were run on a CPU with this vLLM.

    vLLM 0.30 crashes at the first request with a draft model: it prepares the inputs with Triton kernels.
    """
    return frozenset({"ngram"}) | (_DRAFTING if _is_at_least(0, 31) else frozenset())


def parsers_say_whether_to_see_every_request() -> bool:
    """Return whether a parser has `always_adjust_request`."""
    return _is_at_least(0, 32)


def _is_at_least(*wanted: int) -> bool:
    """Return whether vLLM is this version or newer; a version that cannot be read counts as the newest."""
    found = versions.release("vllm")
    return found is None or found >= wanted
