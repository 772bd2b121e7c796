"""Validates and compiles guides as vLLM does, in a process that can be killed (`checker_child`).

vLLM 0.30 validates a guide on the event loop, and its engine core compiles it without a limit: a schema of
23 KB blocked the worker for 4 s, and one of 6 KB blocked all other guided requests for minutes. Here both
happen before the engine sees the guide; `patches.guides` then skips the second validation in vLLM.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches import grammar_steps, table
from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.job import GUIDE_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.engine.vllm.names import Config


LOAD = f"{__name__}:load"
_USUAL = '{"type": "object", "properties": {"a": {"type": ["string", "number", "boolean", "null"]}}}'
"""Is compiled once, so that the compiler has cached the rules for common types."""


def payload(config: Config) -> bytes:
    """Returns the configuration for `load`, pickled as vLLM pickles it for its own processes."""
    from multiprocessing.reduction import ForkingPickler

    return bytes(ForkingPickler.dumps(config))


def load(sent: bytes) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Loads the tokenizer and the possible backends, in the process that checkers are forked from."""
    return VllmChecker(pickle.loads(sent)).check


class VllmChecker:
    """Validates and compiles guides as vLLM does, in one thread."""

    def __init__(self, config: Config) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        table.apply(Where.GUIDE_CHECKER)
        self._config = config
        has_tokenizer = not config.model_config.skip_tokenizer_init
        self._tokenizer = cached_tokenizer_from_config(config.model_config) if has_tokenizer else None
        self._end_token = getattr(self._tokenizer, "eos_token_id", None)
        chosen = config.structured_outputs_config.backend
        names = ("xgrammar", "guidance") if chosen == "auto" else (chosen,)
        self._backends = {name: self._backend(name) for name in names} if has_tokenizer else {}

    def _backend(self, name: str) -> Any:
        from vllm.v1.structured_output import GuidanceBackend, XgrammarBackend

        vocabulary = self._config.model_config.get_vocab_size()
        about = {"tokenizer": self._tokenizer, "vocab_size": vocabulary}
        if name == "guidance":
            return GuidanceBackend(self._config, **about)
        if name == "outlines":
            from vllm.v1.structured_output.backend_outlines import OutlinesBackend

            return OutlinesBackend(self._config, **about)
        if name == "lm-format-enforcer":
            from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend

            return LMFormatEnforcerBackend(self._config, **about)
        made = XgrammarBackend(self._config, **about)
        made.compiler.compile_json_schema(_USUAL)
        return made

    def check(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the backend and the changed fields for the engine, or why the guide is refused."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        config = self._config
        try:
            made = StructuredOutputsParams(**fields)
            params = SamplingParams(structured_outputs=made)
            params._validate_structured_outputs(
                config.model_config, config.structured_outputs_config, self._tokenizer
            )
            self._compile(made)
        except Exception as exc:
            if _is_memory_error(exc):
                raise MemoryError from None
            return {"refused": str(exc.args[0]) if exc.args else str(exc)}
        changes = {k: v for k in GUIDE_KINDS if (v := getattr(made, k)) != fields.get(k)}
        return {"backend": made._backend, "changes": changes}

    def _compile(self, made: Any) -> None:
        """Compiles with every backend: the engine core uses that of its first guide for all later ones."""
        from vllm.v1.structured_output.request import get_structured_output_key

        kind, text = get_structured_output_key(made)
        for name, backend in self._backends.items():
            try:
                grammar = backend.compile_grammar(kind, text)
                grammar_steps.walk(grammar, backend.allocate_token_bitmask(1), self._end_token)
            except Exception as exc:
                if name == made._backend or isinstance(exc, grammar_steps.TooSlow) or _is_memory_error(exc):
                    raise


def _is_memory_error(exc: BaseException | None) -> bool:
    """Returns whether memory ran out: vLLM 0.30 reports every exception of a backend as a bad guide."""
    while exc is not None:
        if isinstance(exc, MemoryError) or "bad_alloc" in str(exc):
            return True
        exc = exc.__cause__ or exc.__context__
    return False
