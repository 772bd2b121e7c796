"""Keeps vLLM from doing with a guide what a judge has done already, or what has no limit. Three patches.

What is wrong in vLLM 0.30:

- It checks a guide on the event loop, judged or not: 23 KB of a client's schema stopped the worker for 4 s.
  And it refuses a guide whose backend is named already, as a judge does it.
- It gives outlines the schemas that neither xgrammar nor guidance takes. Outlines makes a regular expression
  of a schema, twice as long with every array inside another: 836 bytes took all memory. And the engine keeps
  the backend of the first request with a constraint: outlines would refuse grammars and choices ever after.
- It lets xgrammar compile in eight threads, which are in each other's way in a judge, which may use little.

What we do: leave out the check of a judged guide (`skip_judged`); refuse what only outlines takes, unless the
operator chose outlines by --structured-outputs-config (`refuse_outlines`); compile in one thread in judges
(`compile_in_one_thread`).

They can go when vLLM bounds the time and the memory that a guide may take.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches.patch import Where, in_vllm, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_BYTES = 16 << 20
"""What xgrammar may keep of the guides that one process judged."""
_ONLY_OUTLINES = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "patternProperties": {"^x": {"type": "string"}},
}


def refuse_outlines() -> None:
    from vllm.v1.structured_output import backend_outlines

    wrap(backend_outlines, "validate_structured_output_request_outlines", _only_if_chosen)


def _only_if_chosen(ask_outlines: Callable[[Any], None]) -> Callable[[Any], None]:
    from vllm.exceptions import VLLMValidationError

    def validate(params: Any) -> None:
        if params.structured_outputs._backend != "auto":
            ask_outlines(params)
            return
        why = sys.exception() or "xgrammar does not take it."  # its own words, as vLLM handles them
        raise VLLMValidationError(f"{why} patternProperties cannot stand beside properties, for one")

    return validate


def outlines_is_asked() -> bool:
    params = _checked({"json": _ONLY_OUTLINES})
    return bool(params.structured_outputs._backend == "outlines")


def skip_judged() -> None:
    from vllm.sampling_params import SamplingParams

    wrap(SamplingParams, "_validate_structured_outputs", _unless_judged)


def _unless_judged(check: Callable[..., None]) -> Callable[..., None]:
    """A judge has done it, and named the backend, which vLLM's clients cannot."""

    def validate(params: Any, *context: Any, **named: Any) -> None:
        guide = params.structured_outputs
        if guide is None or guide._backend is None:
            check(params, *context, **named)

    return validate


def judged_guides_are_checked() -> bool:
    from vllm.exceptions import VLLMValidationError

    try:
        _checked({"regex": "a"}, backend="xgrammar")
    except VLLMValidationError:
        return True
    return False


def _checked(fields: dict[str, Any], backend: str | None = None) -> Any:
    """What vLLM makes of a guide where the operator chose no backend."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    guide = StructuredOutputsParams(**fields)
    guide._backend = backend
    params = SamplingParams(structured_outputs=guide)
    model, config = SimpleNamespace(is_diffusion=False), SimpleNamespace(backend="auto")
    params._validate_structured_outputs(model, config, object())
    return params


def compile_in_one_thread() -> None:
    import xgrammar

    if xgrammar.GrammarCompiler.__module__ == __name__:
        return

    class Compiler(xgrammar.GrammarCompiler):
        def __init__(self, tokenizer_info: Any, **_: Any) -> None:
            super().__init__(tokenizer_info, max_threads=1, cache_limit_bytes=KEPT_BYTES)

    xgrammar.GrammarCompiler = Compiler  # type: ignore[misc]


def eight_threads_compile() -> bool:
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    return "max_threads=8" in source(XgrammarBackend.__post_init__)


_GUIDED = (Where.WORKER, Where.OMNI_WORKER, Where.JUDGE)
PATCHES = (
    in_vllm(
        name="guides-outlines",
        targets=("vllm.v1.structured_output.backend_outlines.validate_structured_output_request_outlines",),
        defect="schemas that xgrammar does not take go to outlines, which may take all memory for one",
        upstream="https://github.com/vllm-project/vllm/issues/54003",
        where=_GUIDED,
        apply=refuse_outlines,
        still_needed=outlines_is_asked,
    ),
    in_vllm(
        name="guides-judged",
        targets=("vllm.sampling_params.SamplingParams._validate_structured_outputs",),
        defect="a guide that was judged is checked again, on the event loop and without a limit",
        upstream="https://github.com/vllm-project/vllm/issues/54003",
        where=_GUIDED,
        apply=skip_judged,
        still_needed=judged_guides_are_checked,
    ),
    in_vllm(
        name="guides-one-thread",
        targets=("xgrammar.GrammarCompiler",),
        defect="a guide is compiled in eight threads, also in a judge that may use little",
        where=(Where.JUDGE,),
        apply=compile_in_one_thread,
        still_needed=eight_threads_compile,
    ),
)
