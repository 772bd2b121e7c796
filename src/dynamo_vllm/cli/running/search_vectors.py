"""Embeds texts through /v1/embeddings, and keeps the vectors of passages in a file."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import tempfile
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import private
from dynamo_vllm.observe.frontend_client import FrontendClient, Unanswered, answered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

AT_ONCE = 64
"""Texts of one request."""
SAME = 0.999
"""The cosine from which a vector counts as the one that is kept: other kernels round differently."""


class Embedder:
    """One model at one server."""

    def __init__(self, client: FrontendClient, model: str) -> None:
        self._client = client
        self.model = model

    def embed(self, texts: Sequence[str], told: Callable[[int], None] = lambda _: None) -> Vectors:
        """Return one row of length 1 per text; `told` hears how many are done."""
        import numpy as np

        rows: list[Vectors] = []
        for start in range(0, len(texts), AT_ONCE):
            body = {"model": self.model, "input": list(texts[start : start + AT_ONCE])}
            found = answered(self._client.post("/v1/embeddings", {**body, "encoding_format": "base64"}))
            items = sorted(found["data"], key=lambda item: int(item["index"]))
            rows += (_numbers(item["embedding"]) for item in items)
            told(len(rows))
        if len(rows) != len(texts) or len({len(row) for row in rows}) > 1:
            raise Unanswered(f"{self.model} returned other vectors than it was asked for")
        made = np.asarray(rows, np.float32)
        lengths = np.linalg.norm(made, axis=1, keepdims=True)
        unit: Vectors = made / np.where(lengths == 0, 1, lengths)
        return unit


def _numbers(embedding: Any) -> Vectors:
    """Read either format: not every server knows base64."""
    import numpy as np

    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), np.float32)
    return np.asarray(embedding, np.float32)


def of_passages(
    embedder: Embedder, texts: Sequence[str], folder: Path, told: Callable[[int], None]
) -> tuple[Vectors, bool]:
    """Return the vectors of passages, and whether they were kept from an earlier time.

    A file is named for the model and the texts. A model may change under its name, so the first text is
    embedded again each time and compared.
    """
    import numpy as np

    digest = hashlib.sha256("\0".join((embedder.model, *texts)).encode("utf-8", "surrogatepass"))
    file = folder / f"{digest.hexdigest()[:32]}.npy"
    kept = _load(file)
    if kept is not None and kept.shape[:1] == (len(texts),):
        first = embedder.embed(texts[:1])[0]
        if first.shape == kept.shape[1:] and float(np.dot(first, kept[0])) > SAME:
            return kept, True
    made = embedder.embed(texts, told)
    with contextlib.suppress(OSError):  # a full or read-only disk costs time, not the answer
        _save(file, made)
    return made, False


def _load(file: Path) -> Vectors | None:
    import numpy as np

    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError):
        return None
    return found if found.ndim == 2 and found.dtype == np.float32 else None


def _save(file: Path, vectors: Vectors) -> None:
    import numpy as np

    private.make(file.parent)
    handle, path = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "wb") as out:
        np.save(out, vectors)
    os.replace(path, file)
