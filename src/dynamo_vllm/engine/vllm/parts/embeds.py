"""Reads prompt embeddings from a client: base64 of a file that torch.save wrote for one tensor.

The file is untrusted. 1 KB can allocate terabytes or run code, a row of the wrong width crashes vLLM's
engine, and a NaN stays in its KV cache and corrupts other clients' answers.
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
"""How many files are read at a time: reading one needs three times its size for a moment."""
SMALLEST_ROWS = 8
MAX_BYTES = 64 * 2**20
"""The limit of a decoded file for every model; the frontend (ai-dynamo-runtime 1.6.1) allows 10 MB."""
MAX_VALUE = 1e4
"""Is far above real embeddings, and finite in every dtype. A layer norm turns 1e20 into NaN in float32, and
float16 overflows when it adds two values of 6e4; models with an RMS norm accept up to 3e38."""
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
    """Reads the prompt embeddings of one engine, in its own threads."""

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
    """Returns the tensor in `text`, checked and in the model's dtype. Raises InvalidRequest or TooLong."""
    limit = min(MAX_BYTES, max_rows * hidden_size * 8 + _OVERHEAD_BYTES)
    pickled, values = _parts(_decoded(text, limit))
    tensor = _two_dimensional(_loaded(pickled, values))
    _check_shape(tensor, hidden_size, max_rows)
    _check_values(tensor)
    # A copy: a view would keep the whole original tensor in memory.
    own = tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    return Embeds(len(own), own)


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, parameter="prompt_embeds")


def _decoded(text: str, limit: int) -> bytes:
    size = len(text) * 3 // 4
    if size > limit:
        raise _refused(f"has {size} bytes; this model accepts at most {limit}")
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise _refused(f"is not base64 ({exc}); {_HELP}") from None


def _parts(data: bytes) -> tuple[bytes, bytes]:
    """Returns the pickle and the values of the one tensor in the file."""
    if data[:1] == b"\x80":
        raise _refused("is a bare pickle, which could hold code; save it in torch's zip format, the default")
    if _directory_bytes(data) > _MAX_DIRECTORY_BYTES:  # each entry costs memory when zipfile reads it
        raise _refused(f"is a zip of many files; {_HELP}")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _checked_parts(archive)
    except InvalidRequest:
        raise
    except Exception as exc:  # zipfile raises many kinds of exceptions
        raise _refused(f"is not a file of torch.save; {_HELP}") from exc


def _directory_bytes(data: bytes) -> int:
    """Returns the size of the zip's directory, as its last record and the zip64 record before it state."""
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
        raise _refused(f"is not a file of one tensor; {_HELP}")
    _check_names(archive.read(pickled))
    if len(storages) != 1:
        raise _refused(f"has {len(storages)} tensors; {_HELP}")
    if "byteorder" in found and archive.read(found["byteorder"]) != b"little":
        raise _refused("is in big-endian order; save it on a little-endian machine")
    return archive.read(pickled), archive.read(found[storages[0]])


def _check_names(pickled: bytes) -> None:
    """Refuses names that a tensor does not need: torch.load(weights_only=True) allows bytearray(2**40)."""
    try:
        names = [str(arg) for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL"]
    except (ValueError, IndexError, struct.error) as exc:
        raise _refused(f"has a pickle that cannot be read; {_HELP}") from exc
    for name in names:
        is_storage = name.startswith("torch ") and name.endswith("Storage")
        if not is_storage and name not in _NAMES_OF_A_TENSOR:
            named = name.replace(" ", ".")[:80]
            raise _refused(f"imports {named!r}, which a dense tensor of floating-point numbers does not need")


def _loaded(pickled: bytes, values: bytes) -> object:
    """Loads the two parts from a new archive, because torch might interpret the client's differently."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as made:
        made.writestr("tensor/data.pkl", pickled)
        made.writestr("tensor/byteorder", b"little")
        made.writestr("tensor/data/0", values)
        made.writestr("tensor/version", b"3\n")
    archive.seek(0)
    try:
        loaded = torch.load(archive, map_location="cpu", weights_only=True)
    except Exception as exc:  # as does the unpickler
        raise _refused(f"is refused by torch.load; {_HELP}") from exc
    if type(loaded) not in (torch.Tensor, torch.nn.Parameter):
        raise _refused(f"is a {type(loaded).__name__}; {_HELP}")
    if loaded.dtype not in _DTYPES:
        raise _refused(f"has dtype {loaded.dtype}; send float16, bfloat16, float32 or float64")
    if loaded.numel() * loaded.itemsize > len(values):
        raise _refused(f"has shape {_shape(loaded)} but only {len(values)} bytes; send tensor.contiguous()")
    return loaded


def _two_dimensional(tensor: Any) -> Any:
    """Removes the batch dimension of a batch of one prompt, as vLLM does."""
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
            f"has {rows} rows; this model accepts {max_rows}, plus at least one generated token",
            parameter="prompt_embeds",
        )


def _check_values(tensor: Any) -> None:
    low, high = torch.aminmax(tensor.detach())
    if not (float(low) >= -MAX_VALUE and float(high) <= MAX_VALUE):  # also for NaN
        raise _refused(f"has a NaN or a value beyond ±{MAX_VALUE:g}; check tensor.abs().max()")


def _shape(tensor: Any) -> str:
    return str(tuple(tensor.shape))
