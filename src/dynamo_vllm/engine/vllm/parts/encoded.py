"""Reads encoder outputs of an encode worker from their shared folder."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from dynamo_vllm.engine.encoder_cache.folder import Folder


@dataclass(frozen=True, slots=True)
class Encoded:
    """Holds an encoder output (rows, width), and the metadata that determines its number of prompt tokens."""

    tensor: torch.Tensor
    about: Mapping[str, Any]


class EncodedFolder:
    """Reads the folder of engines with the same encoder as this one."""

    def __init__(self, folder: Folder, width: int, dtype: torch.dtype) -> None:
        self._folder = folder
        self._width = width
        self._dtype = dtype

    async def read(self, name: str) -> Encoded:
        read = functools.partial(self._folder.read, name, self._width, self._dtype)
        tensor, about = await asyncio.get_running_loop().run_in_executor(None, read)
        return Encoded(tensor, about)
