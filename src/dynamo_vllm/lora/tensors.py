"""Reads the header of a safetensors file: names, types and shapes, checked against the file's size."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_DIMENSIONS = 8
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
NOT_FINITE = {
    "F64": 0x7FF0_0000_0000_0000,
    "F32": 0x7F80_0000,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,
}
"""The floating-point types, each with the bits that are all set in an infinity or NaN and in no number."""


class BrokenFile(Exception):
    """The file does not follow the format; the message says where."""


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    start: int
    """The offset from the beginning of the file."""
    bytes: int


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the header; raises BrokenFile, OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise BrokenFile(f"{path.name} has {size} bytes; it is empty or cut short")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise BrokenFile(f"{path.name} is not a safetensors file: its header would have {length} bytes")
        if 8 + length > size:
            raise BrokenFile(f"{path.name} is cut short: a header of {length} bytes in a file of {size}")
        header = _json(path, file.read(length))
    tensors = {
        name: _tensor(path, name, entry, 8 + length, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _json(path: Path, raw: bytes) -> Mapping[str, object]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise BrokenFile(f"{path.name} is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise BrokenFile(f"{path.name} is not a safetensors file: its header is not an object")
    return header


def _tensor(path: Path, name: str, entry: object, data: int, size: int) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise BrokenFile(f"{path.name}: tensor {name} has no dtype, shape and data_offsets")
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise BrokenFile(f"{path.name}: tensor {name} has the shape {str(shape)[:100]}")
    if not 0 <= begin <= end or data + end > size:
        raise BrokenFile(f"{path.name} is cut short: tensor {name} ends at {data + end}, the file at {size}")
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise BrokenFile(f"{path.name}: tensor {name} declares {dtype} {shape} in {end - begin} bytes")
    return Tensor(dtype, tuple(shape), data + begin, end - begin)


def _check_layout(path: Path, tensors: Mapping[str, Tensor], data: int, size: int) -> None:
    """Check that every byte belongs to exactly one tensor."""
    at = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if tensor.start != at:
            raise BrokenFile(f"{path.name}: tensor {name} starts at {tensor.start} instead of {at}")
        at += tensor.bytes
    if at != size:
        raise BrokenFile(f"{path.name} has {size} bytes; its tensors take {at}")


def first_not_finite(path: Path, tensors: Mapping[str, Tensor], chunk_bytes: int = 8 << 20) -> str | None:
    """Return the name of a tensor with NaN or an infinity. Types other than floating point are skipped."""
    import numpy as np

    buffer = np.empty(chunk_bytes // 8, np.uint64)
    with path.open("rb", buffering=0) as file:
        for name, tensor in tensors.items():
            if tensor.dtype not in NOT_FINITE:
                continue
            mask = NOT_FINITE[tensor.dtype]
            numbers = buffer.view(f"<u{ITEM_BYTES[tensor.dtype]}")
            file.seek(tensor.start)
            left = tensor.bytes // numbers.itemsize
            while left:
                part = numbers[: min(left, len(numbers))]
                _fill(file, part.data.cast("B"), path)
                if bool(((part & mask) == mask).any()):
                    return name
                left -= len(part)
    return None


def _fill(file: Any, into: memoryview, path: Path) -> None:
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])
        if not count:
            raise BrokenFile(f"{path.name} was cut short while it was read")
        done += count
