"""Keeps vLLM from validating a guide twice, and from compiling it without limits. Three patches.

What is wrong in vLLM 0.30:

- It validates every guide on the event loop: a client's schema of 23 KB blocked the worker for 4 s. It also
  refuses a guide that names a backend, as every guide does after our guide checker.
- It sends schemas that neither xgrammar nor guidance supports to outlines. Outlines converts a schema into a
  regular expression that doubles in length with every nested array: 836 bytes took all memory. And the engine
  uses the backend of its first guided request for all later ones: outlines would then refuse grammars and
  choices.
- It has xgrammar compile in eight threads, which slow each other down in a guide checker with little CPU
  time.

What we do: skip the validation of a checked guide (`skip_checked`); refuse what only outlines supports,
unless the operator chose outlines by --structured-outputs-config (`refuse_outlines`); compile in one thread
in guide checkers (`compile_in_one_thread`).

They can go when vLLM limits the time and memory that a guide may take.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches.patch import Where, in_vllm, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_BYTES = 16 << 20
"""The limit of xgrammar's cache of compiled guides in one guide checker."""
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
        why = sys.exception() or "xgrammar does not support it."  # vLLM is handling xgrammar's exception
        raise VLLMValidationError(f"{why} For example, patternProperties cannot be combined with properties")

    return validate


def outlines_is_asked() -> bool:
    params = _checked({"json": _ONLY_OUTLINES})
    return bool(params.structured_outputs._backend == "outlines")


def skip_checked() -> None:
    from vllm.sampling_params import SamplingParams

    wrap(SamplingParams, "_validate_structured_outputs", _unless_checked)


def _unless_checked(check: Callable[..., None]) -> Callable[..., None]:
    """Skips the validation if a backend is set: only the guide checker can set it, clients cannot."""

    def validate(params: Any, *context: Any, **named: Any) -> None:
        guide = params.structured_outputs
        if guide is None or guide._backend is None:
            check(params, *context, **named)

    return validate


def checked_guides_are_checked_again() -> bool:
    from vllm.exceptions import VLLMValidationError

    try:
        _checked({"regex": "a"}, backend="xgrammar")
    except VLLMValidationError:
        return True
    return False


def _checked(fields: dict[str, Any], backend: str | None = None) -> Any:
    """Returns what vLLM makes of a guide if the operator chose no backend."""
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


_GUIDED = (Where.WORKER, Where.OMNI_WORKER, Where.GUIDE_CHECKER)
PATCHES = (
    in_vllm(
        name="guides-outlines",
        targets=("vllm.v1.structured_output.backend_outlines.validate_structured_output_request_outlines",),
        defect="schemas that xgrammar does not support go to outlines, which may use all memory for one",
        upstream="https://github.com/vllm-project/vllm/issues/54003",
        where=_GUIDED,
        apply=refuse_outlines,
        still_needed=outlines_is_asked,
    ),
    in_vllm(
        name="guides-judged",
        targets=("vllm.sampling_params.SamplingParams._validate_structured_outputs",),
        defect="a guide that was checked is checked again, on the event loop and without a limit",
        upstream="https://github.com/vllm-project/vllm/issues/54003",
        where=_GUIDED,
        apply=skip_checked,
        still_needed=checked_guides_are_checked_again,
    ),
    in_vllm(
        name="guides-one-thread",
        targets=("xgrammar.GrammarCompiler",),
        defect="a guide is compiled in eight threads, even in a guide checker with little CPU time",
        where=(Where.GUIDE_CHECKER,),
        apply=compile_in_one_thread,
        still_needed=eight_threads_compile,
    ),
)
