"""Changes how vLLM-Omni draws through the diffusers adapter, and lets go of dead stages. Four patches.

What is wrong in vLLM-Omni 0.30:

- The adapter never looks whether its request was cancelled: pictures are drawn to the end when nobody waits
  for them any more.
- A request that names no guidance gets none from it, whatever the model's own pipeline would do by itself,
  and draws much worse for it.
- It writes every prompt and every step into the log.
- To a drawing stage that died beside others the worker says goodbye, and waits for good until somebody
  listens; every job on its way waits with it, and the worker's end too.

What we do: look after every step; leave guidance to the pipeline; log warnings only and show no progress bar;
say goodbye without waiting.

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


def end_cancelled_drawings() -> None:
    adapter = _adapter()
    wrap(adapter, _BUILD, _looking_after_every_step)
    setattr(adapter, _CANCELLABLE, True)


def _looking_after_every_step(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    from vllm_omni.diffusion.cancellation import check_request_cancellation

    def look(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        check_request_cancellation()
        return tensors

    def build_call_kwargs(self: Any, request: Any) -> dict[str, Any]:
        made = build(self, request)
        if self._accept_call_kwargs is None or _CALLBACK in self._accept_call_kwargs:
            made.setdefault(_CALLBACK, look)
        return made

    return build_call_kwargs


def cancelled_drawings_go_on() -> bool:
    return not getattr(_adapter(), _CANCELLABLE, False)


def say_goodbye_without_waiting() -> None:
    from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient

    wrap(StageDiffusionClient, "shutdown", _without_waiting)


def _without_waiting(shutdown: Callable[[Any], None]) -> Callable[[Any], None]:
    def shut_down(self: Any) -> None:
        self._request_socket.sndtimeo = 0  # a stage that lives is connected, and gets it at once
        shutdown(self)

    return shut_down


def goodbye_waits() -> bool:
    from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient

    text = source(StageDiffusionClient.shutdown)
    return "_request_socket.send(" in text and "NOBLOCK" not in text and "sndtimeo" not in text.lower()


_DRAW = f"{ADAPTER}.DiffusersAdapterPipeline"
PATCHES = (
    in_omni(
        name="omni-log",
        targets=(f"{_DRAW}._build_call_kwargs",),
        defect="every prompt and every step of a drawing is written into the log",
        apply=log_warnings_only,
        still_needed=every_step_is_logged,
    ),
    in_omni(
        name="omni-guidance",
        targets=(f"{_DRAW}._build_call_kwargs",),
        defect="a request that names no guidance is drawn without any, whatever the model's default",
        apply=leave_guidance_to_the_pipeline,
        still_needed=guidance_is_always_given,
    ),
    in_omni(
        name="omni-cancellation",
        targets=(f"{_DRAW}._build_call_kwargs", f"{_DRAW}.supports_request_cancellation"),
        defect="a cancelled picture is drawn to its end",
        apply=end_cancelled_drawings,
        still_needed=cancelled_drawings_go_on,
    ),
    in_omni(
        name="omni-goodbye",
        targets=("vllm_omni.diffusion.stage_diffusion_client.StageDiffusionClient.shutdown",),
        defect="the worker waits for good for a drawing stage that died",
        apply=say_goodbye_without_waiting,
        still_needed=goodbye_waits,
    ),
)
