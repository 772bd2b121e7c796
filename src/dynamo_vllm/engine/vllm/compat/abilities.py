"""Says what the installed vLLM can do and an older one cannot. Imports no vLLM."""

from __future__ import annotations

from dynamo_vllm.engine.vllm.compat import versions

_DRAFTING = frozenset({"draft_model", "eagle", "eagle3", "mtp"})


def guessing_methods_on_cpu() -> frozenset[str]:
    """Return the methods of speculative decoding that were run on a CPU with this vLLM.

    vLLM 0.30 ends with the first request of a draft model: what that reads is made by kernels of Triton.
    """
    return frozenset({"ngram"}) | (_DRAFTING if _is_at_least(0, 31) else frozenset())


def parsers_say_whether_to_see_every_request() -> bool:
    """Whether a parser has `always_adjust_request`."""
    return _is_at_least(0, 32)


def _is_at_least(*wanted: int) -> bool:
    """Also for a build of vLLM whose version cannot be read: it is taken for the newest."""
    found = versions.release("vllm")
    return found is None or found >= wanted
