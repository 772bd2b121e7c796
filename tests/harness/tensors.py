"""Prompt embeddings as clients send them, good and bad."""

from __future__ import annotations

import base64
import io
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HIDDEN = 256
MARK = "DYNAMO_VLLM_TEST_PWNED"


def encode(value: Any, **how: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return b64(buffer.getvalue())


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def rows(count: int, width: int = HIDDEN, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).mul(0.1).to(dtype)


def table(model: Path) -> torch.Tensor:
    """The model's own embeddings, one row per token id."""
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")["model.embed_tokens.weight"]


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.putenv, (MARK, "1"))


def archive(
    pickled: bytes, values: bytes = b"", how: int = zipfile.ZIP_STORED, order: bytes = b"little"
) -> str:
    """A zip like torch's, with anything in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as made:
        made.writestr("a/data.pkl", pickled)
        made.writestr("a/byteorder", order)
        made.writestr("a/data/0", values)
        made.writestr("a/version", b"3\n")
    return b64(buffer.getvalue())


def pickle_of(text: str) -> bytes:
    """The pickle inside an encoded tensor."""
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(text))) as found:
        return found.read("archive/data.pkl")


def with_value(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = rows(5, dtype=dtype)
    made[3, 7] = value
    return made


def huge_sparse() -> torch.Tensor:
    """1.5 KB that stand for 4 TiB."""
    at, size = torch.tensor([[0], [0]]), (2**32, HIDDEN)
    return torch.sparse_coo_tensor(at, torch.ones(1), size, check_invariants=True)


def bytearray_bomb() -> bytes:
    """Allowed by torch.load(weights_only=True): a call of bytearray(2**36)."""
    return b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + (2**36).to_bytes(5, "little") + b"\x85R."


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(rows(5), 0.1, 0, torch.qint8)


PICKLE = pickle_of(encode(rows(5)))


def claiming(numbers: int) -> str:
    """Five rows that claim a storage of so many numbers."""
    true, claimed = (5 * HIDDEN).to_bytes(2, "little"), numbers.to_bytes(4, "little")
    assert PICKLE.count(b"M" + true) == 1
    return archive(PICKLE.replace(b"M" + true, b"J" + claimed), bytes(5 * HIDDEN * 4))


def many_entries() -> str:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for number in range(5000):
            made.writestr(f"a/{number}", b"")
    return b64(buffer.getvalue())


def hidden_entries() -> str:
    """The same with a small number in its last record and the true one in the record for large files."""
    data = base64.b64decode(many_entries())
    at, end = len(data) - 22, struct.unpack("<4s4H2LH", data[-22:])
    true = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, end[3], end[4], end[5], end[6])
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    return b64(data[:-22] + true + locator + struct.pack("<4s4H2LH", *end[:3], 1, 1, 46, 0, 0))


GOOD: dict[str, Callable[[], Any]] = {
    "float32": lambda: rows(5),
    "float16": lambda: rows(5, dtype=torch.float16),
    "bfloat16": lambda: rows(5, dtype=torch.bfloat16),
    "float64": lambda: rows(5, dtype=torch.float64),
    "a batch of one": lambda: rows(5)[None],
    "a parameter": lambda: torch.nn.Parameter(rows(5)),
    "with a gradient": lambda: rows(5).requires_grad_(),
    "a view": lambda: rows(50)[10:15],
    "transposed": lambda: rows(HIDDEN, 5).T,
    "negated in place": lambda: torch.complex(rows(5), rows(5)).conj().imag,
    "one row": lambda: rows(1),
    "zeros": lambda: torch.zeros(5, HIDDEN),
    "large but sane": lambda: with_value(9999.0),
}

TOO_FAR = "has a NaN or a value beyond"
BAD: dict[str, tuple[Callable[[], str], str]] = {
    "not base64": (lambda: "!" + encode(rows(5)), "is not base64"),
    "base64 with a line break": (lambda: "AAAA\n" + encode(rows(5)), "is not base64"),
    "not ASCII": (lambda: "ä" + encode(rows(5)), "is not base64"),
    "text": (lambda: b64(b"hello " * 40), "is not a file of torch.save"),
    "a zip of nothing": (lambda: b64(b"PK\x05\x06" + bytes(108)), "is not a file of torch.save"),
    "cut off": (lambda: b64(base64.b64decode(encode(rows(5)))[:-300]), "is not a file of torch.save"),
    "a zip of thousands": (many_entries, "is a zip of many files"),
    "a zip that hides thousands": (hidden_entries, "is a zip of many files"),
    "the old format": (lambda: encode(rows(5), _use_new_zipfile_serialization=False), "is a bare pickle"),
    "a pickle of code": (lambda: encode(Evil()), "imports 'posix.putenv'"),
    "a bare pickle of code": (lambda: b64(pickle.dumps([Evil(), "x" * 99])), "is a bare pickle"),
    "a newer pickle": (lambda: encode(rows(5), pickle_protocol=4), "is refused by torch.load"),
    "a bomb of bytes": (lambda: archive(bytearray_bomb()), "imports 'builtins.bytearray'"),
    "a compressed bomb": (lambda: archive(PICKLE, bytes(2**24), zipfile.ZIP_DEFLATED), "is compressed"),
    "a long pickle": (lambda: archive(b"\x80\x02" + b"N0" * 4000 + b"N."), "is not a file of one tensor"),
    "a pickle of noise": (lambda: archive(b"\x80\x02\xff\xfe\xfd."), "a pickle that cannot be read"),
    "an empty pickle": (lambda: archive(b""), "a pickle that cannot be read"),
    "a storage that is not there": (
        lambda: archive(PICKLE.replace(b"\0\0\x000", b"\0\0\x009")),
        "torch.load",
    ),
    "a storage larger than its bytes": (lambda: claiming(2**28), "is refused by torch.load"),
    "a storage smaller than its bytes": (lambda: claiming(4 * HIDDEN), "is refused by torch.load"),
    "big-endian": (lambda: archive(PICKLE, bytes(5120), order=b"big"), "is in big-endian order"),
    "several tensors": (lambda: encode([rows(5), rows(6)]), "has 2 tensors"),
    "a dictionary": (lambda: encode({"x": rows(5)}), "is a dict"),
    "a list": (lambda: encode([rows(5)]), "is a list"),
    "a number": (lambda: encode(7), "has 0 tensors"),
    "a sparse tensor": (lambda: encode(rows(5).to_sparse()), "_rebuild_sparse_tensor"),
    "a sparse tensor of terabytes": (lambda: encode(huge_sparse()), "_rebuild_sparse_tensor"),
    "a quantised tensor": (lambda: encode(quantised()), "_rebuild_qtensor"),
    "a tensor without storage": (lambda: encode(rows(5).to("meta")), "_rebuild_meta_tensor"),
    "an expanded tensor": (lambda: encode(rows(1).expand(1000, HIDDEN)), "only 1024 bytes"),
    "one dimension": (lambda: encode(rows(1)[0]), "has the shape (256,)"),
    "a batch of two": (lambda: encode(rows(6).reshape(2, 3, HIDDEN)), "has the shape (2, 3, 256)"),
    "four dimensions": (lambda: encode(rows(5)[None, None]), "has the shape (1, 1, 5, 256)"),
    "a scalar": (lambda: encode(torch.tensor(1.0)), "has the shape ()"),
    "too narrow": (lambda: encode(rows(5, 100)), "embeddings have 256 columns"),
    "too wide": (lambda: encode(rows(5, 512)), "embeddings have 256 columns"),
    "no rows": (lambda: encode(rows(0)), "has no rows"),
    "integers": (lambda: encode(rows(5, dtype=torch.int64)), "has dtype torch.int64"),
    "booleans": (lambda: encode(rows(5, dtype=torch.bool)), "has dtype torch.bool"),
    "complex numbers": (lambda: encode(rows(5, dtype=torch.complex64)), "has dtype torch.complex64"),
    "eight-bit floats": (lambda: encode(rows(5, dtype=torch.float8_e4m3fn)), "_rebuild_tensor_v3"),
    "NaN": (lambda: encode(with_value(float("nan"))), TOO_FAR),
    "NaN in float16": (lambda: encode(with_value(float("nan"), torch.float16)), TOO_FAR),
    "Inf": (lambda: encode(with_value(float("inf"))), TOO_FAR),
    "-Inf": (lambda: encode(with_value(float("-inf"), torch.bfloat16)), TOO_FAR),
    "Inf once in the model's dtype": (lambda: encode(with_value(1e300, torch.float64)), TOO_FAR),
    "a value that overflows inside": (lambda: encode(with_value(3e38)), TOO_FAR),
}
"""What is refused, and a part of the words."""
