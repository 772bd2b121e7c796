"""Tests the pooling role: bodies to jobs, vectors to answers, refusals by field."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest

from dynamo_vllm.engine.fake import pooling as fake
from dynamo_vllm.engine.fake.spec import FakeSpec, facts_of
from dynamo_vllm.errors import EngineRequestFailed, InvalidRequest, RequestError
from dynamo_vllm.job import Job, Output
from dynamo_vllm.roles.pooling import Pooling

EMBEDS = FakeSpec(pooling="embed", dimensions=4, context_length=50)
SCORES = FakeSpec(pooling="classify", labels=1, context_length=50)
CLASSES = FakeSpec(pooling="classify", labels=3, context_length=50)


def role(spec: FakeSpec = EMBEDS, max_items: int = 5) -> Pooling:
    return Pooling(facts_of(spec), fake.FakePrompts(spec.vocab_size), ["m"], max_items=max_items)


async def answered(raw: dict[str, Any], spec: FakeSpec = EMBEDS) -> list[Any]:
    made = role(spec)
    request = made.parse(raw)
    job = await made.prepare(request, "job")
    assert job.pooling is not None
    encoder = made.encoder(request, job)
    size = spec.dimensions if spec.pooling == "embed" else spec.labels
    return [encoder.encode(output) for output in fake.outputs(job.pooling, size)]


async def prepared(raw: dict[str, Any], spec: FakeSpec = EMBEDS) -> Job:
    made = role(spec)
    return await made.prepare(made.parse(raw), "job")


async def refusal(raw: dict[str, Any], spec: FakeSpec = EMBEDS) -> str:
    with pytest.raises(RequestError) as caught:
        await prepared(raw, spec)
    return str(caught.value)


# What the frontend 1.6.1 passes on differs by path in these fields.
EMBEDDINGS: dict[str, Any] = {"model": "m"}
CLASSIFY: dict[str, Any] = {"model": "m", "priority": 0}
POOLING: dict[str, Any] = {"model": "m", "priority": 0, "encoding_format": "float"}


async def test_embeddings_have_an_item_per_text_and_usage() -> None:
    (chunk,) = await answered({**EMBEDDINGS, "input": ["ab", "c"]})
    assert chunk["object"] == "list" and chunk["model"] == "m"
    assert [item["index"] for item in chunk["data"]] == [0, 1]
    assert [len(item["embedding"]) for item in chunk["data"]] == [4, 4]
    assert chunk["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


async def test_base64_has_the_same_numbers() -> None:
    (plain,) = await answered({**EMBEDDINGS, "input": "abc"})
    (coded,) = await answered({**EMBEDDINGS, "input": "abc", "encoding_format": "base64"})
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert list(struct.unpack("<4f", raw)) == plain["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("ab", [[97, 98]]), (["ab", "c"], [[97, 98], [99]]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
async def test_input_may_have_four_forms(given: Any, tokens: list[list[int]]) -> None:
    job = await prepared({**EMBEDDINGS, "input": given})
    assert job.pooling is not None
    assert [list(prompt.tokens) for prompt in job.pooling.prompts] == tokens
    assert job.prompt_tokens == sum(map(len, tokens))


async def test_millions_of_ids_leave_the_event_loop_to_others() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(other())
    assert "has 1000000 tokens" in await refusal({**EMBEDDINGS, "input": [1] * 1_000_000})
    task.cancel()
    assert turns > 1  # on the loop it would have no turn before the answer


async def test_the_path_is_told_by_what_the_frontend_adds() -> None:
    (classes,) = await answered({**CLASSIFY, "input": "a"}, CLASSES)
    assert classes["data"][0]["num_classes"] == 3
    assert classes["data"][0]["label"].startswith("label")
    (pooled,) = await answered({**POOLING, "input": "a"}, CLASSES)
    assert pooled["data"][0]["object"] == "pooling"
    (ranked,) = await answered({"model": "m", "query": "ab", "documents": ["c", "ab"]}, SCORES)
    assert [item["index"] for item in ranked] == [1, 0]
    assert ranked[0]["document"] == "ab"


async def test_gateway_gets_scores_in_the_order_of_documents() -> None:
    body = {"_api": "score", "query": "ab", "documents": ["c", "ab"]}
    for spec in (SCORES, EMBEDS):
        (chunk,) = await answered(body, spec)
        assert len(chunk["scores"]) == 2
        assert chunk["scores"][1] > chunk["scores"][0]
        assert chunk["usage"]["prompt_tokens"] > 0
    several = await prepared({**body, "query": ["a", "b"]}, EMBEDS)
    assert several.pooling is not None
    assert several.pooling.pairs == [(0, 2), (1, 3)]


async def test_large_answers_come_in_pieces_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_vllm.roles.pooling.VALUES_PER_OUTPUT", 8)
    chunks = await answered({**EMBEDDINGS, "input": ["a", "b", "c", "d", "e"]})
    assert [[item["index"] for item in chunk["data"]] for chunk in chunks] == [[0, 1], [2, 3], [4]]
    assert sum(chunk["usage"]["prompt_tokens"] for chunk in chunks) == 5


REFUSALS: dict[str, list[tuple[Any, str]]] = {
    "input": [
        (None, "input: is missing"),
        ("", "input[0]: is empty"),
        ([], "input: is empty"),
        (["a", 5], "input[1]: is not a text"),
        ([5, "a"], "input[0]: is not a list of token ids"),
        ([[5], "a"], "input[1]: is not a list of token ids"),
        ([[True]], "input[0]: is not a list of token ids"),
        ([[]], "input[0]: is empty"),
        ([[1000]], "input[0]: 1000 is not in the vocabulary"),
        ([{"a": 1}], "input: is a text, a list of texts"),
        (["a"] * 6, "input: has 6 items; a request may have 5"),
        ("a" * 51, "input[0]: has 51 tokens; this model takes 50"),
        (7, "input"),
    ],
    "dimensions": [(5, "dimensions: 5 is not 1 to 4"), (-1, "dimensions: -1 is not 1 to 4")],
    "encoding_format": [("hex", "encoding_format: 'hex' is unknown")],
    "truncate_prompt_tokens": [(51, "truncate_prompt_tokens: 51 is not 1 to 50")],
    "truncation_side": [("up", "truncation_side: 'up' is unknown")],
    "chat_template_kwargs": [({"chat_template": "x"}, "clients may not set chat_template")],
    "documents": [
        ([], "documents: is empty"),
        (["a", ""], "documents[1]: is empty"),
    ],
    "query": [
        ([], "query: is empty"),
        (["a", "b"], "query: 2 queries for 1 documents"),
        ("", "query[0]: is empty"),
        (None, "query"),
    ],
    "top_n": [(0, "top_n: is not 1 or more")],
    "max_tokens_per_doc": [(50, "max_tokens_per_doc: 50 is not 0 to 49")],
}
PAIR = {"query": "a", "documents": ["a"]}


async def test_refusals_name_the_field() -> None:
    for field, cases in REFUSALS.items():
        body = PAIR if field in ("documents", "query", "top_n", "max_tokens_per_doc") else {"input": "a"}
        for value, message in cases:
            assert message in await refusal({**EMBEDDINGS, **body, field: value})
    assert "there is no message" in await refusal({**EMBEDDINGS, "messages": []})


async def test_a_model_is_asked_only_for_what_it_does() -> None:
    assert "this model does not embed" in await refusal({**EMBEDDINGS, "input": "a"}, CLASSES)
    assert "does not score pairs" in await refusal({"query": "a", "documents": ["b"]}, CLASSES)
    assert "one length only" in await refusal({**POOLING, "input": "a", "dimensions": 2}, CLASSES)
    assert "task: this model does not token_embed" in await refusal(
        {**POOLING, "input": "a", "task": "token_embed"}
    )


def test_card_names_what_the_frontend_serves() -> None:
    assert role(EMBEDS).card.endpoint_types == ("embeddings", "pooling", "rerank")
    assert role(SCORES).card.endpoint_types == ("classify", "pooling", "rerank")
    assert role(CLASSES).card.endpoint_types == ("classify", "pooling")


async def test_health_check_is_a_request_of_the_role() -> None:
    for spec in (EMBEDS, SCORES, CLASSES):
        assert await answered(role(spec).health_check(), spec)
        for trial in role(spec).trials(Any).longer:  # type: ignore[arg-type]
            assert (await prepared(trial.request, spec)).prompt_tokens == trial.prompt_tokens


async def test_what_is_not_a_number_is_an_error_of_the_engine() -> None:
    made = role()
    request = made.parse({**EMBEDDINGS, "input": "a"})
    job = await made.prepare(request, "job")
    broken = Output([], pooled=[fake.FakeVector([1.0, float("nan")])], finished=True)
    with pytest.raises(EngineRequestFailed):
        made.encoder(request, job).encode(broken)
    with pytest.raises(InvalidRequest):
        made.parse([])  # a body that is no object
