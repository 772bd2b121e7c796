"""Bodies of rankings and scores as several libraries send them, and the answers that these expect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_vllm.gateway import body_parts
from dynamo_vllm.gateway.apis import rerank, scores
from dynamo_vllm.gateway.replies import GatewayError
from harness.refusals import refused

USAGE = {"prompt_tokens": 9, "total_tokens": 9}


def ranking(*, cohere: bool = False, **fields: Any) -> rerank.Ranking:
    body = {"model": "m", "query": "q", "documents": ["a", "b", "c"], **fields}
    return rerank.read(json.dumps(body).encode(), returns_documents=not cohere, shortens=cohere)


def pairs(**fields: Any) -> scores.Pairs:
    return scores.read(json.dumps({"model": "m", **fields}).encode())


def test_best_documents_come_first_and_equal_ones_in_their_order() -> None:
    found = rerank.results(ranking(top_n=3), [0.5, 0.75, 0.5])
    assert [one["index"] for one in found] == [1, 0, 2]
    assert found[0] == {"index": 1, "relevance_score": 0.75, "document": {"text": "b"}}


def test_top_n_cuts() -> None:
    for top_n, count in {None: 3, 0: 3, 1: 1, 2: 2, 100: 3}.items():
        assert len(rerank.results(ranking(top_n=top_n), [0.1, 0.2, 0.3])) == count, top_n


def test_documents_are_texts_or_objects() -> None:
    asked = ranking(query={"text": "q"}, documents=["a", {"text": "b", "title": "B"}])
    assert asked.for_worker == {"model": "m", "query": "q", "documents": ["a", "b"]}
    assert ranking(documents="a").documents == ["a"]


def test_worker_gets_what_only_it_understands() -> None:
    ours: dict[str, Any] = {"top_n": 1, "return_documents": False, "rank_fields": ["text"]}
    asked = ranking(max_tokens_per_doc=5, instruction="i", **ours)
    assert {"max_tokens_per_doc": 5, "instruction": "i"}.items() <= asked.for_worker.items()
    assert not ours.keys() & asked.for_worker.keys()
    assert "document" not in rerank.results(asked, [1.0, 2.0, 3.0])[0]


def test_shape_of_jina_and_vllm() -> None:
    found = rerank.answer(ranking(top_n=1), [1.0, 2.0, 3.0], USAGE, "rerank-1")
    assert found == {
        "id": "rerank-1",
        "object": "list",
        "model": "m",
        "usage": USAGE,
        "results": [{"index": 2, "relevance_score": 3.0, "document": {"text": "c"}}],
    }


def test_shape_of_cohere() -> None:
    asked = ranking(cohere=True, top_n=1)
    found = rerank.cohere_answer(asked, [1.0, 2.0, 3.0], USAGE, "1")
    assert found["results"] == [{"index": 2, "relevance_score": 3.0}]
    assert found["meta"]["tokens"] == {"input_tokens": 9, "output_tokens": 0}
    assert asked.for_worker["truncate_prompt_tokens"] == -1, "Cohere shortens long documents"
    assert "truncate_prompt_tokens" not in ranking(cohere=True, max_tokens_per_doc=3).for_worker


def test_bad_ranking_is_refused_with_its_field() -> None:
    odd: dict[str, tuple[Any, ...]] = {
        "model": (None, ""),
        "query": (None, 5),
        "documents": (None, []),
        "top_n": (-1, True, "3"),
        "return_documents": ("yes",),
    }
    for name, values in odd.items():
        for value in values:
            with refused(400, parameter=name):
                ranking(**{name: value})
    for document in (5, {"title": "b"}):
        with refused(400, parameter="documents[1]"):
            ranking(documents=["a", document])


def test_scores_have_several_names_for_their_texts() -> None:
    expected = {"model": "m", "query": "a", "documents": ["b", "c"], "use_activation": False}
    for query, documents in scores.NAMES:
        request = pairs(**{query: "a", documents: ["b", "c"]}, use_activation=False)
        assert request.for_worker == expected


def test_scores_are_of_one_or_as_many() -> None:
    assert pairs(text_1=["a"], text_2="b").for_worker["query"] == "a"
    assert pairs(text_1=["a", "b"], text_2=["c", "d"]).for_worker["query"] == ["a", "b"]
    with refused(400, "text_1 has 2 texts and text_2 3"):
        pairs(text_1=["a", "b"], text_2=["c", "d", "e"])


def test_bad_scores_are_refused_with_their_field() -> None:
    odd: dict[str, dict[str, Any]] = {
        "queries": {},
        "text_2": {"text_1": "a"},
        "data_1": {"data_2": "a"},
        "data_2": {"data_1": "a", "data_2": []},
        "text_2[0]": {"text_1": "a", "text_2": [1]},
    }
    for name, fields in odd.items():
        with refused(400, parameter=name):
            pairs(**fields)


def test_refusal_of_a_worker_names_the_field_of_the_client() -> None:
    asked = pairs(text_1="a", text_2=["b", ""])
    found = scores.in_words_of(asked, GatewayError(400, "documents[1]: is empty", parameter="documents[1]"))
    assert (found.message, found.parameter) == ("text_2[1]: is empty", "text_2[1]")
    other = GatewayError(400, "truncate_prompt_tokens: 0", parameter="truncate_prompt_tokens")
    assert scores.in_words_of(asked, other) is other


def test_shape_of_scores() -> None:
    found = scores.answer(pairs(text_1="a", text_2=["b", "c"]), [0.5, -1.0], USAGE, "score-1")
    assert found.pop("created") > 0
    assert found == {
        "id": "score-1",
        "object": "list",
        "model": "m",
        "data": [{"index": index, "object": "score", "score": (0.5, -1.0)[index]} for index in (0, 1)],
        "usage": USAGE,
    }


def test_more_values_than_can_be_read_in_a_moment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parts, "MOST_VALUES", 100)
    assert len(ranking(documents=["a"] * 90).documents) == 90
    for read in (ranking, pairs):
        with refused(413, code="too_many_values"):
            read(documents=["a"] * 200)
