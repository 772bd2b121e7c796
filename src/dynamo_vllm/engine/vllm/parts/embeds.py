"""Reads prompt embeddings a client sent: base64 of what torch.save writes for one tensor.

Nothing of it may be believed. A file of 1 KB can ask for terabytes or for code, a row of the wrong width ends
vLLM's engine, and a NaN stays in its cache and spoils other people's answers.
"""

from __future__ import annotations

import asyncio
import binascii
import functools
import io
import pickletools
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pybase64
import torch

from dynamo_vllm.errors import InvalidRequest, TooLong
from dynamo_vllm.job import Embeds

if TYPE_CHECKING:
    from dynamo_vllm.engine.vllm.names import ModelConfig

READERS = 2
"""Files read at a time: each is held three times over for a moment."""
SMALLEST_ROWS = 8
MAX_BYTES = 64 * 2**20
"""Of a decoded file, whatever the model takes; the frontend (ai-dynamo-runtime 1.6.1) stops at 10 MB."""
MAX_VALUE = 1e4
"""Far beyond embeddings, and finite in every dtype. A layer norm makes a NaN of 1e20 in float32, and float16
overflows at the first sum of two values of 6e4; models with an RMS norm stood up to 3e38."""
_OVERHEAD_BYTES = 2**16
_MAX_PICKLE_BYTES = 4096
_MAX_DIRECTORY_BYTES = 2**14
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HELP = "send base64 of torch.save(tensor, buffer) with one dense tensor of shape (rows, hidden size)"
_NAMES_OF_A_TENSOR = {
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "collections OrderedDict",
}


class VllmEmbeds:
    """Reads the vectors that one engine's model takes, in threads of its own."""

    def __init__(self, model: ModelConfig) -> None:
        self._width = model.get_inputs_embeds_size()
        self._max_rows = model.max_model_len - 1
        self._dtype = model.dtype
        self._threads = ThreadPoolExecutor(READERS, "embeds")

    async def read(self, text: str) -> Embeds:
        work = functools.partial(read, text, self._width, self._max_rows, self._dtype)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def smallest(self) -> str:
        buffer = io.BytesIO()
        torch.save(torch.zeros(SMALLEST_ROWS, self._width), buffer)
        return pybase64.b64encode(buffer.getvalue()).decode()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def read(text: str, hidden_size: int, max_rows: int, dtype: torch.dtype) -> Embeds:
    """The tensor in `text`, checked and in the model's dtype; raises InvalidRequest or TooLong."""
    limit = min(MAX_BYTES, max_rows * hidden_size * 8 + _OVERHEAD_BYTES)
    pickled, values = _parts(_decoded(text, limit))
    tensor = _two_dimensional(_loaded(pickled, values))
    _check_shape(tensor, hidden_size, max_rows)
    _check_values(tensor)
    # A copy: a view would keep the whole of what it was cut from.
    own = tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    return Embeds(len(own), own)


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, parameter="prompt_embeds")


def _decoded(text: str, limit: int) -> bytes:
    size = len(text) * 3 // 4
    if size > limit:
        raise _refused(f"has {size} bytes; this model takes at most {limit}")
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise _refused(f"is not base64 ({exc}); {_HELP}") from None


def _parts(data: bytes) -> tuple[bytes, bytes]:
    """The pickle and the numbers of the one tensor in the file."""
    if data[:1] == b"\x80":
        raise _refused("is a bare pickle, which could hold code; save it in torch's zip format, the default")
    if _directory_bytes(data) > _MAX_DIRECTORY_BYTES:  # each entry costs memory when zipfile reads it
        raise _refused(f"is a zip of many files; {_HELP}")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _checked_parts(archive)
    except InvalidRequest:
        raise
    except Exception as exc:  # zipfile raises what it stumbles over
        raise _refused(f"is not a file of torch.save; {_HELP}") from exc


def _directory_bytes(data: bytes) -> int:
    """The size of the zip's directory as its last record states it, and the one for large files before it."""
    end, locator = data[-22:], data[-42:-22]
    if end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise _refused(f"is not a file of torch.save; {_HELP}")
    stated = [end[12:16], data[-58:-50] if locator[:4] == b"PK\x06\x07" else b""]
    return max(int.from_bytes(size, "little") for size in stated)


def _checked_parts(archive: zipfile.ZipFile) -> tuple[bytes, bytes]:
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise _refused("is compressed; torch.save does not do that, send its file as it is")
    found = {entry.filename.partition("/")[2]: entry for entry in entries}
    storages = [name for name in found if name.startswith("data/")]
    pickled = found.get("data.pkl")
    if pickled is None or pickled.file_size > _MAX_PICKLE_BYTES:
        raise _refused(f"is no file of one tensor; {_HELP}")
    _check_names(archive.read(pickled))
    if len(storages) != 1:
        raise _refused(f"holds {len(storages)} tensors; {_HELP}")
    if "byteorder" in found and archive.read(found["byteorder"]) != b"little":
        raise _refused("is in big-endian order; save it on a little-endian machine")
    return archive.read(pickled), archive.read(found[storages[0]])


def _check_names(pickled: bytes) -> None:
    """torch.load(weights_only=True) would run a call of bytearray(2**40), which is not code but enough."""
    try:
        names = [str(arg) for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL"]
    except (ValueError, IndexError, struct.error) as exc:
        raise _refused(f"has a pickle that cannot be read; {_HELP}") from exc
    for name in names:
        is_storage = name.startswith("torch ") and name.endswith("Storage")
        if not is_storage and name not in _NAMES_OF_A_TENSOR:
            named = name.replace(" ", ".")[:80]
            raise _refused(
                f"asks for {named!r}, which a dense tensor of floating-point numbers does not need"
            )


def _loaded(pickled: bytes, values: bytes) -> object:
    """What torch makes of the two parts, in a fresh archive: it must not read the client's its own way."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as made:
        made.writestr("tensor/data.pkl", pickled)
        made.writestr("tensor/byteorder", b"little")
        made.writestr("tensor/data/0", values)
        made.writestr("tensor/version", b"3\n")
    archive.seek(0)
    try:
        loaded = torch.load(archive, map_location="cpu", weights_only=True)
    except Exception as exc:  # so does the unpickler
        raise _refused(f"is refused by torch.load; {_HELP}") from exc
    if type(loaded) not in (torch.Tensor, torch.nn.Parameter):
        raise _refused(f"holds a {type(loaded).__name__}; {_HELP}")
    if loaded.dtype not in _DTYPES:
        raise _refused(f"is of {loaded.dtype}; send float16, bfloat16, float32 or float64")
    if loaded.numel() * loaded.itemsize > len(values):
        raise _refused(f"of shape {_shape(loaded)} carries {len(values)} bytes; send tensor.contiguous()")
    return loaded


def _two_dimensional(tensor: Any) -> Any:
    """A batch of one prompt is that prompt, as in vLLM."""
    return tensor[0] if tensor.dim() == 3 and len(tensor) == 1 else tensor


def _check_shape(tensor: Any, hidden_size: int, max_rows: int) -> None:
    if tensor.dim() != 2:
        raise _refused(f"has the shape {_shape(tensor)}; send (rows, {hidden_size})")
    rows, width = tensor.shape
    if width != hidden_size:
        raise _refused(f"has the shape {_shape(tensor)}; this model's embeddings have {hidden_size} columns")
    if rows == 0:
        raise _refused("has no rows; send at least one")
    if rows > max_rows:
        raise TooLong(
            f"has {rows} rows; this model takes {max_rows} and at least one token of answer",
            parameter="prompt_embeds",
        )


def _check_values(tensor: Any) -> None:
    low, high = torch.aminmax(tensor.detach())
    if not (float(low) >= -MAX_VALUE and float(high) <= MAX_VALUE):  # also for NaN
        raise _refused(f"has a NaN or a value beyond ±{MAX_VALUE:g}; look at torch.isfinite(tensor).all()")


def _shape(tensor: Any) -> str:
    return str(tuple(tensor.shape))
