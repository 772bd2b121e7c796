"""Fixes cancellation, guidance, logging and shutdown of vLLM-Omni's diffusion stages. Four patches.

What is wrong in vLLM-Omni 0.30:

- The diffusers adapter never checks whether its request was cancelled: it finishes images that nobody wants.
- For a request without a guidance scale it turns guidance off instead of using the pipeline's default, and
  the images are much worse.
- It writes every prompt and every step to the log.
- When one of several diffusion stages has died, the worker sends it a shutdown message and waits forever for
  a receiver. Every running job, and the worker's own shutdown, waits with it.

What we do: check after every step; leave guidance to the pipeline; log only warnings and show no progress
bar; send the shutdown message without waiting.

They can go one by one when vLLM-Omni does so.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches.patch import in_omni, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

ADAPTER = "vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter"
_BUILD = "_build_call_kwargs"
_CALLBACK = "callback_on_step_end"
_CANCELLABLE = "supports_request_cancellation"
_GUIDANCE = "guidance_scale"


def _adapter() -> Any:
    return importlib.import_module(ADAPTER).DiffusersAdapterPipeline


def log_warnings_only() -> None:
    logging.getLogger(ADAPTER).setLevel(logging.WARNING)
    wrap(_adapter(), _BUILD, _without_progress)


def _without_progress(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def build_call_kwargs(self: Any, request: Any) -> dict[str, Any]:
        made = build(self, request)
        self._pipeline.set_progress_bar_config(disable=True)
        return made

    return build_call_kwargs


def every_step_is_logged() -> bool:
    return "set_progress_bar_config" not in source(importlib.import_module(ADAPTER))


def leave_guidance_to_the_pipeline() -> None:
    wrap(_adapter(), _BUILD, _with_own_guidance)


def _with_own_guidance(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def build_call_kwargs(self: Any, request: Any) -> dict[str, Any]:
        made = build(self, request)
        if not request.sampling_params.guidance_scale_provided:
            made.pop(_GUIDANCE, None)
            made |= {k: v for k, v in self.od_config.diffusers_call_kwargs.items() if k == _GUIDANCE}
        return made

    return build_call_kwargs


def guidance_is_always_given() -> bool:
    return "guidance_scale_provided" not in source(importlib.import_module(ADAPTER))


def stop_cancelled_requests() -> None:
    adapter = _adapter()
    wrap(adapter, _BUILD, _checking_after_every_step)
    setattr(adapter, _CANCELLABLE, True)


def _checking_after_every_step(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    from vllm_omni.diffusion.cancellation import check_request_cancellation

    def check(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        check_request_cancellation()
        return tensors

    def build_call_kwargs(self: Any, request: Any) -> dict[str, Any]:
        made = build(self, request)
        if self._accept_call_kwargs is None or _CALLBACK in self._accept_call_kwargs:
            made.setdefault(_CALLBACK, check)
        return made

    return build_call_kwargs


def cancelled_requests_continue() -> bool:
    return not getattr(_adapter(), _CANCELLABLE, False)


def shut_down_without_waiting() -> None:
    from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient

    wrap(StageDiffusionClient, "shutdown", _without_waiting)


def _without_waiting(shutdown: Callable[[Any], None]) -> Callable[[Any], None]:
    def shut_down(self: Any) -> None:
        self._request_socket.sndtimeo = 0  # a live stage is connected and gets the message at once
        shutdown(self)

    return shut_down


def shutdown_waits() -> bool:
    from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient

    text = source(StageDiffusionClient.shutdown)
    return "_request_socket.send(" in text and "NOBLOCK" not in text and "sndtimeo" not in text.lower()


_DIFFUSERS = f"{ADAPTER}.DiffusersAdapterPipeline"
PATCHES = (
    in_omni(
        name="omni-log",
        targets=(f"{_DIFFUSERS}._build_call_kwargs",),
        defect="every prompt and every diffusion step is written to the log",
        apply=log_warnings_only,
        still_needed=every_step_is_logged,
    ),
    in_omni(
        name="omni-guidance",
        targets=(f"{_DIFFUSERS}._build_call_kwargs",),
        defect="a request without a guidance scale gets no guidance instead of the model's default",
        apply=leave_guidance_to_the_pipeline,
        still_needed=guidance_is_always_given,
    ),
    in_omni(
        name="omni-cancellation",
        targets=(f"{_DIFFUSERS}._build_call_kwargs", f"{_DIFFUSERS}.supports_request_cancellation"),
        defect="a cancelled image is generated to the end",
        apply=stop_cancelled_requests,
        still_needed=cancelled_requests_continue,
    ),
    in_omni(
        name="omni-goodbye",
        targets=("vllm_omni.diffusion.stage_diffusion_client.StageDiffusionClient.shutdown",),
        defect="the worker waits forever for a diffusion stage that died",
        apply=shut_down_without_waiting,
        still_needed=shutdown_waits,
    ),
)
