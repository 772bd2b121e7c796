"""What encoders made of media, in a folder that several engines share: a file per medium, whole or not there.

A file is in safetensors' format: one tensor (rows, width) and, in its header, what the model's processor said
about the medium. It is written under another name and renamed, so nobody reads half of one. The folder keeps
to a number of bytes: what was not used for longest goes first. Nobody may count on a file: whoever finds
none, or one that does not fit, encodes the medium itself.
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
"""As vLLM's own connector for folders calls it."""
FORGOTTEN_SECONDS = 60.0
"""A file not yet renamed after this long is of an encoder that was killed."""
FOLDER, MAX_BYTES = "folder", "max_bytes"
"""What the connector is told in vLLM's ec_connector_extra_config."""
_SUFFIX, _UNFINISHED = ".safetensors", ".part"
_NAME = re.compile("(?:[0-9a-f]{16}-)?([0-9a-f]{64})")
_MAX_HEADER_BYTES = 1 << 16
_ABOUT = "about"


def engine_config(role: str, folder: str, max_bytes: int) -> dict[str, Any]:
    """vLLM's ec_transfer_config for `encoder_cache.connector`; `role` is ec_producer or ec_consumer."""
    return {
        "ec_connector": "FolderConnector",
        "ec_connector_module_path": "dynamo_vllm.engine.encoder_cache.connector",
        "ec_role": role,
        "ec_connector_extra_config": {FOLDER: folder, MAX_BYTES: max_bytes},
    }


class Unusable(ValueError):
    """No file, or one that must not reach the engine; the text says why."""


def own_name(name: str) -> str | None:
    """A medium's name without what the frontend put before it; None for names that are never kept."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


class Folder:
    def __init__(self, path: str | Path, max_bytes: int) -> None:
        self.path = Path(path)
        self._max_bytes = max_bytes
        for made in (self.path.parent, self.path):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        """Whether there is a file; if so it counts as used now."""
        path = self._path(name)
        if path is None:
            return False
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(path)
        return path.exists()

    def write(self, name: str, tensor: Any, about: Mapping[str, Any]) -> None:
        """Raises OSError; a name that is never kept is passed over."""
        from safetensors.torch import save

        if own_name(name) is not None:
            self.keep(name, save({TENSOR: tensor.detach().cpu().contiguous()}, {_ABOUT: json.dumps(about)}))

    def keep(self, name: str, data: bytes | memoryview) -> None:
        """The file's bytes as they are; whoever reads it checks them."""
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
        """The tensor and what is known about the medium; raises Unusable.

        Read, not mapped: a mapped file that somebody cuts short ends the process.
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
            raise Unusable(f"it holds {sorted(tensors)}, not one {TENSOR}")
        wanted = (tensor.shape[0] if rows is None and tensor.ndim else rows, width)
        if tuple(tensor.shape) != wanted or not len(tensor):
            raise Unusable(f"its shape is {tuple(tensor.shape)}, not {wanted}")
        if tensor.dtype != dtype:
            raise Unusable(f"it is of {tensor.dtype}, not {dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise Unusable("it has a NaN or an infinity")
        return tensor, about

    def contents(self, name: str, max_bytes: int) -> bytes:
        """The file as it is; raises Unusable. It counts as used now."""
        path = self._path(name)
        if path is None:
            raise Unusable("its name is none of ours")
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > max_bytes:
                    raise Unusable(f"it has {size} bytes, more than {max_bytes}")
                data = file.read(max_bytes)
        except OSError as exc:
            raise Unusable(f"{type(exc).__name__}: {exc}") from None
        with contextlib.suppress(OSError):  # gone by now, or a folder that may only be read
            os.utime(path)
        return data

    def evict(self, keep: str = "") -> None:
        """Down to the limit, the longest unused first; `keep` stays, even when it is above the limit."""
        files, total, now = [], 0, time.time()
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    continue
                if entry.name.endswith(_UNFINISHED) and now - found.st_mtime > FORGOTTEN_SECONDS:
                    os.unlink(entry.path)
                elif entry.name.endswith(_SUFFIX):
                    total += found.st_size
                    if entry.name != keep:
                        files.append((found.st_mtime_ns, found.st_size, entry.path))
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                return
            with contextlib.suppress(FileNotFoundError):  # another encoder was quicker
                os.unlink(path)
            total -= size

    def _path(self, name: str) -> Path | None:
        own = own_name(name)
        return None if own is None else self.path / f"{own}{_SUFFIX}"


def _about(data: bytes) -> dict[str, object]:
    """What the writer said in the header; safetensors has checked the header's length."""
    length = int.from_bytes(data[:8], "little")
    told = json.loads(data[8 : 8 + length]).get("__metadata__", {}).get(_ABOUT, "{}")
    found = json.loads(told)
    if not isinstance(found, dict):
        raise ValueError("its header tells nothing about the medium")
    return found
