"""What our plugin mends in vLLM-Omni 0.30, inside the processes of its stages and the worker that has them.

Pictures through the diffusers adapter are drawn to the end also when nobody waits for them any more: the
adapter never looks whether its request was cancelled. Here it looks after every step.

A request that names no guidance gets none from it, whatever the model's own pipeline would do by itself, and
draws much worse for it. And it writes every prompt and every step into the log.

To a drawing stage that died beside others the worker says goodbye, and waits for good until somebody listens;
every job on its way waits with it, and the worker's end too.

The store where the processes of a drawing stage meet is at localhost; torch lets it listen on every address.
"""

from __future__ import annotations

import importlib
import logging
import socket
from typing import Any

_ADAPTER = "vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter"
_CALLBACK = "callback_on_step_end"
_GUIDANCE = "guidance_scale"
_LOOPBACK = "127.0.0.1"


def mend() -> None:
    logging.getLogger(_ADAPTER).setLevel(logging.WARNING)
    from vllm_omni.diffusion.cancellation import check_request_cancellation

    adapter = importlib.import_module(_ADAPTER).DiffusersAdapterPipeline
    if adapter.__dict__.get("supports_request_cancellation"):
        return
    build = adapter._build_call_kwargs

    def mended(self: Any, request: Any) -> dict[str, Any]:
        made: dict[str, Any] = build(self, request)
        self._pipeline.set_progress_bar_config(disable=True)
        if not request.sampling_params.guidance_scale_provided:
            made.pop(_GUIDANCE, None)
            made |= {k: v for k, v in self.od_config.diffusers_call_kwargs.items() if k == _GUIDANCE}
        if self._accept_call_kwargs is None or _CALLBACK in self._accept_call_kwargs:
            made.setdefault(_CALLBACK, _look)
        return made

    def _look(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        check_request_cancellation()
        return tensors

    adapter._build_call_kwargs = mended
    adapter.supports_request_cancellation = True
    _mend_goodbye()
    mend_store()


def _mend_goodbye() -> None:
    from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient

    shutdown = StageDiffusionClient.shutdown

    def mended(self: Any) -> None:
        self._request_socket.sndtimeo = 0  # a stage that lives is connected, and gets it at once
        shutdown(self)

    StageDiffusionClient.shutdown = mended


def mend_store() -> None:
    """Torch's server of a store is told a host, and listens on that only where it is given the socket."""
    from torch.distributed import TCPStore

    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has this name too
    create = rendezvous._create_c10d_store

    def mended(
        hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True
    ) -> Any:
        if rank != 0 or hostname not in ("localhost", _LOOPBACK):
            return create(hostname, port, rank, world_size, timeout, use_libuv)
        with socket.create_server((_LOOPBACK, port)) as listener:
            return TCPStore(
                host_name=_LOOPBACK,
                port=listener.getsockname()[1],
                world_size=world_size,
                is_master=True,
                timeout=timeout,
                multi_tenant=True,
                use_libuv=use_libuv,
                master_listen_fd=listener.detach(),
            )

    rendezvous._create_c10d_store = mended
