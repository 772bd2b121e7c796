"""Measures free device memory; vLLM loads this as its worker extension."""

from __future__ import annotations

import torch


class MemoryExtension:
    """Adds a method to vLLM's worker class, which runs where the device is."""

    def dynamo_free_bytes(self) -> int:
        """Returns how many bytes of device memory are free."""
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])
