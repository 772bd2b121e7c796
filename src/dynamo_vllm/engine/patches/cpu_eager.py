"""Keeps torch.compile out of the requests of an engine on CPU.

vLLM 0.30 compiles its sampler, its log-probabilities and parts of some models where they are first called. On
a CPU that is a C++ compiler inside a request, for up to 90 s, and the end of the engine where there is none.
Here they run eagerly. A model is compiled in vLLM's warm-up, before there are requests, and nowhere else; one
that cannot be compiled runs eagerly too, instead of ending the engine at every start.

It can go when vLLM compiles nothing on a CPU after its warm-up and goes on where a compiler is missing.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.logger import init_logger
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

logger = init_logger("vllm.dynamo_vllm")  # below vLLM's own, which is shown in engine cores
EAGER, COMPILED = "force_eager", "eager_on_recompile"
"""torch's words: never compile; use what is compiled and compile no more."""
_MENDED = "warming_up_model_of_vllm"


def mend() -> None:
    torch.compiler.set_stance(EAGER)
    if hasattr(CPUModelRunner, _MENDED):
        return
    # Called in every step, and within the warm-up, which may compile: unwrapped rather than held back.
    sample = topk_topp_sampler.compiled_random_sample
    topk_topp_sampler.compiled_random_sample = sample._torchdynamo_orig_callable
    setattr(CPUModelRunner, _MENDED, CPUModelRunner.warming_up_model)
    CPUModelRunner.warming_up_model = _compiled_or_eager


def _compiled_or_eager(self: Any) -> None:
    """Instead of CPUModelRunner.warming_up_model."""
    if self.vllm_config.compilation_config.mode == CompilationMode.NONE:
        return
    try:
        with torch.compiler.set_stance("default"):
            getattr(self, _MENDED)()
    except Exception as exc:  # of the compiler, or of the model itself: then it comes again below
        logger.warning("the model could not be compiled and runs eagerly: %s", _first_line(exc))
        for module in self.model.modules():
            if hasattr(module, "do_not_compile"):
                module.do_not_compile = True
        self.profile_run()
    else:
        torch.compiler.set_stance(COMPILED)


def _first_line(exc: BaseException) -> str:
    text = next((line.strip() for line in str(exc).splitlines() if line.strip()), "")
    return f"{type(exc).__name__}: {text}"
