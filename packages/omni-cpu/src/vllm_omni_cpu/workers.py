"""vLLM's CPU worker with vLLM-Omni's model runners.

The order of bases matters: Omni's runner first, vLLM's CPU runner behind it. Both descend from vLLM's GPU
runner and call on by `super()`, so Omni's part finds the CPU's where it expects the GPU's.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class CpuArModelRunner(GPUARModelRunner, CPUModelRunner):
    """Autoregressive stages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._postprocess_tensors()  # the CPU runner did so before Omni's made its buffers


class CpuGenerationModelRunner(GPUGenerationModelRunner, CPUModelRunner):
    """Stages that make their whole output in one pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._postprocess_tensors()


class _CpuOmniWorker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: type[CPUModelRunner]

    def init_device(self) -> None:
        super().init_device()
        self.use_v2_model_runner = False  # vLLM's second runner has no place for Omni's
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)


class CpuArWorker(_CpuOmniWorker):
    model_runner_cls = CpuArModelRunner


class CpuGenerationWorker(_CpuOmniWorker):
    model_runner_cls = CpuGenerationModelRunner
