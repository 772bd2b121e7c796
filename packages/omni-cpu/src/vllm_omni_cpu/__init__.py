"""A CPU platform for vLLM-Omni 0.30."""

from __future__ import annotations


def platform() -> str | None:
    """The platform's class, by name, where vLLM runs on CPU; elsewhere vLLM-Omni's own are meant."""
    from vllm.platforms import current_platform

    return "vllm_omni_cpu.platform.CpuOmniPlatform" if current_platform.is_cpu() else None
