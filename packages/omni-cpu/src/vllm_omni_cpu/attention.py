"""Attention of diffusion models on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

if TYPE_CHECKING:
    import torch


class CpuAttention(SDPAImpl):
    """vLLM-Omni's `forward` asks for the platform and knows none but its own; the computing is the same."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None
    ) -> torch.Tensor:
        return self._forward_impl(query, key, value, attn_metadata)


class CpuAttentionBackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[CpuAttention]:
        return CpuAttention
