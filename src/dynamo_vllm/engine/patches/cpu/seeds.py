"""Keeps a seeded request from crashing an engine on CPU.

What is wrong: when vLLM 0.30 prefills a prompt in several steps, it discards the tokens sampled before the
last step and resets the request's random generator with `set_offset`, which a CPU generator does not have.
The exception crashes the engine.

What we do: reset the generator to its seed, so that the answer does not depend on the number of steps.

It can go when vLLM resets a generator on CPU in another way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import T, on_cpu, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def apply() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(GPUModelRunner, "_bookkeeping_sync", _keeping_seeds)


def still_needed() -> bool:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return "gen.set_offset(gen.get_offset() - 4)" in source(GPUModelRunner._bookkeeping_sync)


def _keeping_seeds(original: Callable[..., T]) -> Callable[..., T]:
    import numpy as np

    def bookkeeping(self: GPUModelRunner, *args: object, **kwargs: object) -> T:
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        held = {int(i): generators.pop(int(i)) for i in discarded if int(i) in generators}
        for generator in held.values():
            generator.manual_seed(generator.initial_seed())
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(held)

    return bookkeeping


PATCHES = (
    on_cpu(
        name="cpu-seeds",
        targets=("vllm.v1.worker.gpu_model_runner.GPUModelRunner._bookkeeping_sync",),
        defect="a seeded prompt that is prefilled in several steps crashes the engine",
        apply=apply,
        still_needed=still_needed,
    ),
)
