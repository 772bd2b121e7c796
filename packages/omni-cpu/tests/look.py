"""Prints what vLLM-Omni finds of the platform, as JSON."""

from __future__ import annotations

import inspect
import json
import queue
import threading

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname as load
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.platforms import current_omni_platform as platform
from vllm_omni.platforms.interface import OmniPlatform


def unanswered() -> list[str]:
    """Questions that vLLM-Omni leaves to its platforms and that nobody below answers."""
    answered = {name for kind in type(platform).__mro__ if kind is not OmniPlatform for name in vars(kind)}
    return [
        name
        for name, method in vars(OmniPlatform).items()
        if isinstance(method, classmethod)
        and "raise NotImplementedError" in inspect.getsource(method.__func__)
        and name not in answered
    ]


def attention_difference() -> float:
    backend = load(platform.get_diffusion_attn_backend_cls(None, 8))
    attention = backend.get_impl_cls()(num_heads=2, head_size=8, softmax_scale=8**-0.5, causal=False)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 5, 2, 8) for _ in range(3))
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    return float((attention.forward(query, key, value) - expected).abs().max())


def refused() -> str:
    try:
        platform.get_diffusion_attn_backend_cls("FLASH_ATTN", 8)
    except ValueError as exc:
        return str(exc)
    return ""


def runners() -> dict[str, dict[str, object]]:
    found = {}
    for name in (platform.get_omni_ar_worker_cls(), platform.get_omni_generation_worker_cls()):
        worker = load(name)
        found[name] = {
            "is_cpu_worker": issubclass(worker, CPUWorker),
            "bases": [kind.__name__ for kind in worker.model_runner_cls.__mro__],
        }
    return found


def handed_over() -> list[tuple[str, str | None]]:
    """What a diffusion worker in a process of its own sends for an output."""
    load(platform.get_diffusion_worker_cls())
    from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

    class Process:
        _async_output_queue: queue.Queue[object] = queue.Queue()
        _async_output_done = threading.Condition()
        _async_output_pending = 1
        sent: list[tuple[str, str | None]] = []

        def _enqueue_result(self, message: object) -> None:
            self.sent.append((message.async_output_id, message.error))  # type: ignore[attr-defined]

    process = Process()
    for item in ((DiffusionOutput(output=torch.zeros(2)), "good", None), None):
        process._async_output_queue.put(item)
    WorkerProc._async_output_loop(process)
    return process.sent


for act in (platform.empty_cache, platform.synchronize, platform.reset_peak_memory_stats):
    act()
free, total = platform.get_device_memory()
print(
    json.dumps(
        {
            "platform": f"{type(platform).__module__}.{type(platform).__qualname__}",
            "unanswered": unanswered(),
            "runners": runners(),
            "attention_difference": attention_difference(),
            "refused": refused(),
            "handed_over": handed_over(),
            "free": free,
            "total": total,
            "devices": platform.get_device_count(),
            "device": str(platform.get_torch_device(3)),
            "device_type": platform.device_type,
        }
    )
)
