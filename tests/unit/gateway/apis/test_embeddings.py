"""Pieces of embeddings put together, and Cohere's form of them."""

from __future__ import annotations

import base64
from array import array
from typing import Any

from dynamo_vllm.gateway.apis import embeddings
from harness.refusals import refused


def chunk(*vectors: list[float], tokens: int) -> dict[str, Any]:
    data = [{"embedding": base64.b64encode(array("f", vector).tobytes()).decode()} for vector in vectors]
    return {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": tokens}}


def test_pieces_are_joined_and_their_tokens_added_up() -> None:
    found = embeddings.joined([chunk([1.0], [2.0], tokens=3), chunk([3.0], tokens=4)])
    assert (len(found["data"]), found["usage"], found["model"]) == (3, {"prompt_tokens": 7}, "m")
    with refused(502):
        embeddings.joined([])


def test_cohere_gets_each_kind_of_numbers() -> None:
    found = embeddings.joined([chunk([0.5, -1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], tokens=2)])
    answer = embeddings.cohere_answer(["float", "base64", "ubinary", "binary"], ["t"], found, "1")
    kinds = answer["embeddings"]
    assert kinds["float"] == [[0.5, -1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]]
    assert kinds["base64"] == [found["data"][0]["embedding"]]
    assert kinds["ubinary"] == [[0b10100001, 0b10000000]]
    assert kinds["binary"] == [[0b10100001 - 128, 0]]
    assert answer["meta"]["billed_units"] == {"input_tokens": 2}


def test_cohere_words_become_ours() -> None:
    fields = {"model": "m", "texts": ["a"], "input_type": "search_query", "output_dimension": 4}
    kinds, body = embeddings.read_cohere({**fields, "truncate": "START"})
    assert kinds == ["float"]
    assert body == {
        "model": "m",
        "input": ["a"],
        "encoding_format": "base64",
        "truncate_prompt_tokens": -1,
        "truncation_side": "left",
        "dimensions": 4,
    }
    assert "truncate_prompt_tokens" not in embeddings.read_cohere({**fields, "truncate": "NONE"})[1]


def test_what_cohere_alone_can_do_is_refused() -> None:
    odd: dict[str, tuple[Any, ...]] = {
        "texts": (None, [], [1]),
        "images": (["data:"],),
        "embedding_types": (["int8"], [["float"]]),
        "truncate": ("MIDDLE", ["END"]),
    }
    for name, values in odd.items():
        for value in values:
            with refused(400, parameter=name):
                embeddings.read_cohere({"model": "m", "texts": ["a"], name: value})
