"""Diffusion workers on CPU."""

from __future__ import annotations

import logging
from typing import Any

from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker import diffusion_worker

logger = logging.getLogger(__name__)


class CpuDiffusionWorker(diffusion_worker.DiffusionWorker):
    """vLLM-Omni's own; it is named here so that this module is loaded where it runs."""


def hand_over_outputs(self: Any) -> None:
    """Instead of a loop that copies outputs from the device on a stream of its own: they are here already."""
    while (item := self._async_output_queue.get()) is not None:
        output, output_id, _ = item
        try:
            pack_diffusion_output_shm(output)
            message = AsyncDiffusionOutput(
                kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id, output=output
            )
        except Exception as exc:  # whatever it is, somebody waits for this output
            logger.exception("an output could not be handed over")
            message = AsyncDiffusionOutput(
                kind=AsyncOutputKind.OUTPUT_READY,
                async_output_id=output_id,
                error=f"the output could not be handed over: {exc}",
            )
        try:
            self._enqueue_result(message)
        finally:
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()


# vLLM-Omni 0.30 asks torch for the accelerator there; without one the thread that hands outputs over dies.
diffusion_worker.WorkerProc._async_output_loop = hand_over_outputs
