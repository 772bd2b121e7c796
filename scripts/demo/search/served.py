"""Asks servers and vLLM itself for embeddings and for the order of passages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from demo.search.score import Embed, Rerank

if TYPE_CHECKING:
    import httpx

AT_ONCE = 32
"""Texts of one request."""


def embedding(url: str, model: str) -> Embed:
    """Embed over HTTP: /v1/embeddings, as OpenAI has it."""
    client = _client(url)

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        found: list[list[float]] = []
        for start in range(0, len(texts), AT_ONCE):
            body = {"model": model, "input": list(texts[start : start + AT_ONCE])}
            rows = _post(client, "/embeddings", body)["data"]
            found += [row["embedding"] for row in sorted(rows, key=lambda row: row["index"])]
        return np.asarray(found, np.float32)

    return embed


def reranking(url: str, model: str) -> Rerank:
    """Rerank over HTTP: /v1/rerank, as Jina has it."""
    client = _client(url)

    def rerank(question: str, texts: Sequence[str]) -> Sequence[float]:
        body = {"model": model, "query": question, "documents": list(texts)}
        numbers = [0.0] * len(texts)
        for row in _post(client, "/rerank", body)["results"]:
            numbers[row["index"]] = row["relevance_score"]
        return numbers

    return rerank


def embedding_in_vllm(folder: Path) -> Embed:
    """Embed with vLLM in this process, without a server."""
    engine = _engine(folder)

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        found = engine.embed(list(texts), use_tqdm=False)
        return np.asarray([one.outputs.embedding for one in found], np.float32)

    return embed


def reranking_in_vllm(folder: Path) -> Rerank:
    engine = _engine(folder)

    def rerank(question: str, texts: Sequence[str]) -> Sequence[float]:
        return [one.outputs.score for one in engine.score(question, list(texts), use_tqdm=False)]

    return rerank


def _engine(folder: Path) -> Any:
    from vllm import LLM

    return LLM(str(folder), runner="pooling", enforce_eager=True, dtype="float32")


def _client(url: str) -> httpx.Client:
    import httpx

    return httpx.Client(base_url=url, timeout=120)


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(path, json=body)
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()
    return found
