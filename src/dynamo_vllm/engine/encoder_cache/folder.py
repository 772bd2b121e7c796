"""Stores encoder outputs in a folder that several engines share, one file per media item.

A file is in safetensors format: one tensor (rows, width), and metadata of the model's processor in the
header. It is written under a temporary name and renamed, so no reader sees half a file. The folder has a size
limit and evicts the least recently used files. A reader must not rely on a file: if it is missing or has the
wrong shape, the reader encodes the media item itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TENSOR = "ec_cache"
"""The name that vLLM's ECExampleConnector uses."""
ABANDONED_SECONDS = 60.0
"""After this time a temporary file is removed: its encoder was killed."""
FOLDER, MAX_BYTES = "folder", "max_bytes"
"""The connector's settings in vLLM's ec_connector_extra_config."""
_SUFFIX, _UNFINISHED = ".safetensors", ".part"
_NAME = re.compile("(?:[0-9a-f]{16}-)?([0-9a-f]{64})")
_MAX_HEADER_BYTES = 1 << 16
_ABOUT = "about"


def engine_config(role: str, folder: str, max_bytes: int) -> dict[str, Any]:
    """Returns vLLM's ec_transfer_config for `encoder_cache.connector`, as ec_producer or ec_consumer."""
    return {
        "ec_connector": "FolderConnector",
        "ec_connector_module_path": "dynamo_vllm.engine.encoder_cache.connector",
        "ec_role": role,
        "ec_connector_extra_config": {FOLDER: folder, MAX_BYTES: max_bytes},
    }


class Unusable(ValueError):
    """Is raised if a file is missing or must not reach the engine; the text says why."""


def own_name(name: str) -> str | None:
    """Returns a media item's name without the frontend's prefix; None for names that are never stored."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


class Folder:
    """Reads, writes and evicts the encoder outputs of one kind of encoder."""

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        self.path = Path(path)
        self._max_bytes = max_bytes
        for made in (self.path.parent, self.path):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        """Returns whether there is a file, and marks it as recently used."""
        path = self._path(name)
        if path is None:
            return False
        with contextlib.suppress(OSError):  # a read-only folder
            os.utime(path)
        return path.exists()

    def write(self, name: str, tensor: Any, about: Mapping[str, Any]) -> None:
        """Writes a tensor with its metadata; ignores names that are never stored. Raises OSError."""
        from safetensors.torch import save

        if own_name(name) is not None:
            self.keep(name, save({TENSOR: tensor.detach().cpu().contiguous()}, {_ABOUT: json.dumps(about)}))

    def keep(self, name: str, data: bytes | memoryview) -> None:
        """Stores the bytes of a file unchecked, because readers check them. Raises OSError."""
        path = self._path(name)
        if path is None:
            return
        unfinished = path.with_suffix(f".{uuid.uuid4().hex}{_UNFINISHED}")
        try:
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        self.evict(keep=path.name)

    def read(self, name: str, width: int, dtype: Any, rows: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Returns the tensor and the metadata of a media item. Raises Unusable.

        The file is read, not memory-mapped: truncating a mapped file would crash the process.
        """
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load

        most = _MAX_HEADER_BYTES + (rows or 1 << 20) * width * dtype.itemsize
        data = self.contents(name, most)
        try:
            tensors, about = load(data), _about(data)
        except (SafetensorError, ValueError, LookupError, AttributeError, RecursionError) as exc:
            raise Unusable(f"{type(exc).__name__}: {exc}") from None
        tensor = tensors.get(TENSOR)
        if tensor is None or len(tensors) != 1:
            raise Unusable(f"it has the tensors {sorted(tensors)}, not only {TENSOR}")
        wanted = (tensor.shape[0] if rows is None and tensor.ndim else rows, width)
        if tuple(tensor.shape) != wanted or not len(tensor):
            raise Unusable(f"its shape is {tuple(tensor.shape)}, not {wanted}")
        if tensor.dtype != dtype:
            raise Unusable(f"its dtype is {tensor.dtype}, not {dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise Unusable("it has NaN or infinite values")
        return tensor, about

    def contents(self, name: str, max_bytes: int) -> bytes:
        """Returns the bytes of a file unchecked, and marks it as recently used. Raises Unusable."""
        path = self._path(name)
        if path is None:
            raise Unusable("its name is not that of an encoder output")
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > max_bytes:
                    raise Unusable(f"it has {size} bytes, more than {max_bytes}")
                data = file.read(max_bytes)
        except OSError as exc:
            raise Unusable(f"{type(exc).__name__}: {exc}") from None
        with contextlib.suppress(OSError):  # the file was evicted, or the folder is read-only
            os.utime(path)
        return data

    def evict(self, keep: str = "") -> None:
        """Removes the least recently used files above the limit, but never the file named `keep`."""
        files, total, now = [], 0, time.time()
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    continue
                if entry.name.endswith(_UNFINISHED) and now - found.st_mtime > ABANDONED_SECONDS:
                    os.unlink(entry.path)
                elif entry.name.endswith(_SUFFIX):
                    total += found.st_size
                    if entry.name != keep:
                        files.append((found.st_mtime_ns, found.st_size, entry.path))
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                return
            with contextlib.suppress(FileNotFoundError):  # another encoder has removed it
                os.unlink(path)
            total -= size

    def _path(self, name: str) -> Path | None:
        own = own_name(name)
        return None if own is None else self.path / f"{own}{_SUFFIX}"


def _about(data: bytes) -> dict[str, object]:
    """Returns the metadata in the header; safetensors has already checked the header's length."""
    length = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + length]).get("__metadata__", {}).get(_ABOUT, "{}")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("its header has no metadata of the media item")
    return found
