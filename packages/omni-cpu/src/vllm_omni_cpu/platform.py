"""What vLLM-Omni asks a platform for, answered for a machine without an accelerator."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

ATTENTION = ("TORCH_SDPA",)
"""Attention backends that run here."""


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with the part vLLM-Omni adds to platforms."""

    _omni_enum = OmniPlatformEnum.OOT

    # --- classes ----------------------------------------------------------------------------------------

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "vllm_omni_cpu.workers.CpuArWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "vllm_omni_cpu.workers.CpuGenerationWorker"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "vllm_omni_cpu.drawing.CpuDiffusionWorker"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend is not None and selected_backend.upper() not in ATTENTION:
            raise ValueError(
                f"diffusion attention backend {selected_backend} does not run on CPU; "
                f"use {ATTENTION[0]} or leave it out"
            )
        return "vllm_omni_cpu.attention.CpuAttentionBackend"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    # --- what the machine can do ------------------------------------------------------------------------

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False  # compiling takes longer than the small models that run here

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls) -> bool:
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return False

    # --- the device and its memory ----------------------------------------------------------------------

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs beside the caller."""

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    # --- what vLLM-Omni finds at torch.<device> on other platforms; torch.cpu has none of it ------------

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def empty_cache(cls) -> None:
        """There is no allocator of ours to empty."""

    @classmethod
    def reset_peak_memory_stats(cls, *_: Any) -> None:
        """Peaks are not kept."""

    @classmethod
    def max_memory_reserved(cls, *_: Any) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, *_: Any) -> int:
        return 0
