"""Turns the vectors of a pooling model into the bodies that the frontend and the gateway expect.

The frontend joins the pieces of an answer and adds their usage up.
"""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import EngineRequestFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_vllm.job import Output, PooledPrompt, Vector
    from dynamo_vllm.wire import Chunk

Item = dict[str, Any]


class VectorsEncoder:
    """One item per prompt: an embedding, or whatever the pooler gives."""

    def __init__(
        self, head: Chunk, prompts: Sequence[PooledPrompt], item: Callable[[int, Vector], Item]
    ) -> None:
        self._head = head
        self._prompts = prompts
        self._item = item

    def encode(self, output: Output) -> Chunk:
        first, pooled = output.index, output.pooled
        data = [self._item(first + number, vector) for number, vector in enumerate(pooled)]
        return {**self._head, "data": data, "usage": usage(self._prompts[first : first + len(pooled)])}


def embeddings(model: str, prompts: Sequence[PooledPrompt], wants_base64: bool) -> VectorsEncoder:
    """Encode for /v1/embeddings."""
    numbers = to_base64 if wants_base64 else to_list

    def item(index: int, vector: Vector) -> Item:
        return {"object": "embedding", "index": index, "embedding": numbers(vector)}

    return VectorsEncoder({"object": "list", "model": model}, prompts, item)


def pooling(job_id: str, model: str, prompts: Sequence[PooledPrompt], wants_base64: bool) -> VectorsEncoder:
    """Encode for /v1/pooling."""
    numbers = to_base64 if wants_base64 else to_list

    def item(index: int, vector: Vector) -> Item:
        return {"object": "pooling", "index": index, "data": numbers(vector)}

    return VectorsEncoder(_head("pool", job_id, model), prompts, item)


def classes(
    job_id: str, model: str, prompts: Sequence[PooledPrompt], labels: Sequence[str | None]
) -> VectorsEncoder:
    """Encode for /v1/classify."""

    def item(index: int, vector: Vector) -> Item:
        chances = to_list(vector)
        best = max(range(len(chances)), key=chances.__getitem__)
        label = labels[best] if best < len(labels) else None
        return {"index": index, "label": label, "probs": chances, "num_classes": len(chances)}

    return VectorsEncoder(_head("classify", job_id, model), prompts, item)


class ScoresEncoder:
    """The scores of all pairs in one chunk, for the gateway."""

    def __init__(self, prompts: Sequence[PooledPrompt]) -> None:
        self._prompts = prompts

    def encode(self, output: Output) -> Chunk:
        return {"scores": scores(output), "usage": usage(self._prompts)}


class RankingEncoder:
    """The frontend's own shape of a ranking: a list, the best document first."""

    def __init__(self, documents: Sequence[str], top_n: int | None, returns_documents: bool) -> None:
        self._documents = documents
        self._top_n = top_n
        self._returns_documents = returns_documents

    def encode(self, output: Output) -> Any:
        found = scores(output)
        order = sorted(range(len(found)), key=lambda index: -found[index])[: self._top_n]
        return [self._item(index, found[index]) for index in order]

    def _item(self, index: int, score: float) -> Item:
        made: Item = {"index": index, "score": score}
        return {**made, "document": self._documents[index]} if self._returns_documents else made


def scores(output: Output) -> list[float]:
    """Return one number per pair."""
    found: list[float] = []
    for vector in output.pooled:
        numbers = to_list(vector)
        found.append(numbers[0] if isinstance(numbers, list) else numbers)
    return found


def usage(prompts: Sequence[PooledPrompt]) -> dict[str, int]:
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def to_list(vector: Vector) -> Any:
    """Return the numbers; JSON has none that are not numbers."""
    numbers = vector.tolist()
    flat = numbers if numbers and not isinstance(numbers[0], list) else [n for row in numbers for n in row]
    total = sum(flat)
    if total - total != 0.0:  # NaN or infinite
        raise EngineRequestFailed("the model computed a value that is not a number")
    return numbers


def to_base64(vector: Vector) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def _head(prefix: str, job_id: str, model: str) -> Chunk:
    return {"id": f"{prefix}-{job_id}", "object": "list", "created": int(time.time()), "model": model}
