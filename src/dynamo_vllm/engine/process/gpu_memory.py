"""Says how much device memory is free; loaded in vLLM's workers as their extension."""

from __future__ import annotations

import torch


class TellsMemory:
    """vLLM mixes this into its worker, where the device is."""

    def dynamo_free_bytes(self) -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])
