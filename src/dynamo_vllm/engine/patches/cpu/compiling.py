"""Keeps an engine on CPU from running torch.compile during requests. Three patches.

What is wrong: vLLM 0.30 compiles its sampler, its log-probabilities and parts of some models when they are
first called. On CPU this runs a C++ compiler inside a request, for up to 90 s, and crashes the engine if
there is no compiler.

What we do: the sampler runs uncompiled (`unwrap_sampler`). A model is compiled in vLLM's warm-up, before the
first request, and nothing is compiled later (`compile_in_warm_up`). A model that cannot be compiled runs
eagerly (`run_eagerly_without_compiler`).

They can go when vLLM compiles nothing on CPU after its warm-up, and continues without a compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import on_cpu, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

EAGER, COMPILED = "force_eager", "eager_on_recompile"
"""torch's stances: never compile; use what is compiled but compile nothing more."""
_PLAIN = "_torchdynamo_orig_callable"
"""The attribute where torch keeps the original of a compiled function."""


def unwrap_sampler() -> None:
    """Replaces the compiled sampler by the original; a stance would not do, as the warm-up may compile."""
    from vllm.v1.sample.ops import topk_topp_sampler

    sample = topk_topp_sampler.compiled_random_sample
    topk_topp_sampler.compiled_random_sample = getattr(sample, _PLAIN, sample)


def sampler_is_compiled() -> bool:
    from vllm.v1.sample.ops import topk_topp_sampler

    return hasattr(topk_topp_sampler.compiled_random_sample, _PLAIN)


def compile_in_warm_up() -> None:
    import torch
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if wrap(CPUModelRunner, "warming_up_model", _compiling_here_only):
        torch.compiler.set_stance(EAGER)


def _compiling_here_only(warm_up: Callable[[CPUModelRunner], None]) -> Callable[[CPUModelRunner], None]:
    import torch
    from vllm.config import CompilationMode

    def warming_up_model(runner: CPUModelRunner) -> None:
        if runner.vllm_config.compilation_config.mode == CompilationMode.NONE:
            return
        with torch.compiler.set_stance("default"):
            warm_up(runner)
        torch.compiler.set_stance(COMPILED)

    return warming_up_model


def requests_are_compiled_for() -> bool:
    """Checks log-probabilities, because every model has them."""
    from vllm.v1.sample.ops import logprobs

    return hasattr(logprobs.batched_count_greater_than, _PLAIN)


def run_eagerly_without_compiler() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    wrap(CPUModelRunner, "warming_up_model", _or_eagerly)


def _or_eagerly(warm_up: Callable[[CPUModelRunner], None]) -> Callable[[CPUModelRunner], None]:
    from vllm.logger import init_logger

    logger = init_logger("vllm.dynamo_vllm")  # below vLLM's own logger, which engine cores show

    def warming_up_model(runner: CPUModelRunner) -> None:
        try:
            warm_up(runner)
        except Exception as exc:  # an error of the model itself is raised again by profile_run
            logger.warning("the model could not be compiled and runs eagerly: %s", _first_line(exc))
            for module in runner.model.modules():
                if hasattr(module, "do_not_compile"):
                    module.do_not_compile = True
            runner.profile_run()

    return warming_up_model


def failed_compilation_ends_the_engine() -> bool:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return "except" not in source(CPUModelRunner.warming_up_model)


def _first_line(exc: BaseException) -> str:
    text = next((line.strip() for line in str(exc).splitlines() if line.strip()), "")
    return f"{type(exc).__name__}: {text}"


_WARM_UP = ("vllm.v1.worker.cpu_model_runner.CPUModelRunner.warming_up_model",)
PATCHES = (
    on_cpu(
        name="cpu-compiled-sampler",
        targets=("vllm.v1.sample.ops.topk_topp_sampler.compiled_random_sample",),
        defect="the first sampled request waits for a C++ compiler, and crashes the engine if there is none",
        upstream="https://github.com/vllm-project/vllm/pull/47756",
        apply=unwrap_sampler,
        still_needed=sampler_is_compiled,
    ),
    on_cpu(
        name="cpu-compiled-requests",
        targets=_WARM_UP,
        defect="parts of a model and log-probabilities are compiled during requests",
        apply=compile_in_warm_up,
        still_needed=requests_are_compiled_for,
    ),
    on_cpu(
        name="cpu-failed-compilation",
        targets=_WARM_UP,
        defect="a model that cannot be compiled crashes the engine at every start",
        # After the one above, and so around it: on failure that one leaves torch unchanged.
        apply=run_eagerly_without_compiler,
        still_needed=failed_compilation_ends_the_engine,
    ),
)
