"""Schemas that neither xgrammar nor guidance takes are refused; vLLM 0.30 gives them to outlines.

Outlines makes a regular expression of a schema, twice as long with every array inside another, while the
worker stands still: 836 bytes of a client's schema took all memory and ended it. And the engine keeps the
backend of the first request with a constraint: outlines would refuse grammars and choices ever after.
"""

from __future__ import annotations

import sys
from typing import Any

_MENDED = "dynamo_vllm_mended"


def mend() -> None:
    """In the worker, where requests are checked. Who chose outlines by --structured-outputs-config has it."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output import backend_outlines

    ask_outlines = backend_outlines.validate_structured_output_request_outlines
    if hasattr(ask_outlines, _MENDED):
        return

    def mended(params: Any) -> None:
        if params.structured_outputs._backend != "auto":
            ask_outlines(params)
            return
        why = sys.exception() or "xgrammar does not take it."  # its own words, as vLLM handles them
        raise VLLMValidationError(f"{why} patternProperties cannot stand beside properties, for one")

    setattr(mended, _MENDED, True)
    backend_outlines.validate_structured_output_request_outlines = mended
