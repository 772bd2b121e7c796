"""Tests pooling models: embeddings, classes and scores equal those of bare vLLM, through the frontend."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from math import hypot
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_models.vision import make_tiny_vision_model
from tokenizers import Tokenizer

from cpu import vision
from cpu.children import Children
from cpu.stacks import Start
from harness.plane import plane
from harness.pooling_models import (
    LABELS,
    LONGEST,
    SMALLER,
    make_classifier,
    make_embedder,
    make_reranker,
    words,
)
from harness.stack import Stack
from harness.waiting import until

CLIENTS = 8
QUERY = words(5, 3)
DOCUMENTS = [words(1 + 37 * number % 400, number) for number in range(60)]


def lengths() -> list[int]:
    """200 lengths from one token to 2000, more of them short, as in life; with the two special tokens."""
    return sorted(max(1, round(2000 * (number / 199) ** 3)) for number in range(200))


TEXTS = [words(count, start) for start, count in enumerate(lengths())]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("models") / "embedder")


@pytest.fixture(scope="module")
def wanted(children: Children, embedder: Path) -> dict[str, Any]:
    """What bare vLLM answers."""
    cases = {"embed": TEXTS, "score": [QUERY, DOCUMENTS]}
    answers: dict[str, Any] = children.ask("bare:pooling", str(embedder), cases)
    return answers


@pytest.fixture(scope="module")
def embeds(start_module: Start, embedder: Path) -> Stack:
    return start_module(model=embedder)


def embedded(made: Stack, texts: Any, **more: Any) -> list[list[float]]:
    # The SDK asks for base64 and decodes it if no format is named.
    answer = made.openai.embeddings.create(model="tiny", input=texts, **more)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def cosine(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / (hypot(*one) * hypot(*other))


def test_embeddings_equal_bare_vllm_for_eight_clients_at_once(embeds: Stack, wanted: dict[str, Any]) -> None:
    size = len(TEXTS) // CLIENTS
    parts = [TEXTS[first : first + size] for first in range(0, len(TEXTS), size)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        found = [one for part in clients.map(lambda part: embedded(embeds, part), parts) for one in part]
    assert min(cosine(one, other) for one, other in zip(found, wanted["embed"], strict=True)) >= 0.9999
    worst = max(
        abs(a - b) for x, y in zip(found, wanted["embed"], strict=True) for a, b in zip(x, y, strict=True)
    )
    assert worst < 1e-4
    # The vectors differ, so that equal ones mean something.
    assert cosine(found[0], found[100]) < 0.99
    answer = embeds.openai.embeddings.create(model="tiny", input=TEXTS[:3])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(wanted["tokens"][:3])


def test_token_ids_mean_the_same_as_their_text(embedder: Path, embeds: Stack) -> None:
    text = words(6, 2)
    ids = Tokenizer.from_file(str(embedder / "tokenizer.json")).encode(text).ids
    wanted = embedded(embeds, text)
    assert embedded(embeds, ids) == [pytest.approx(wanted[0], abs=1e-5)]
    assert embedded(embeds, [ids, ids]) == [pytest.approx(wanted[0], abs=1e-5)] * 2
    bare = embeds.post("/v1/embeddings", {"model": "tiny", "input": text, "add_special_tokens": False}).json()
    assert bare["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("size", SMALLER)
def test_cut_embeddings_have_length_one(embeds: Stack, size: int) -> None:
    (whole,), (cut,) = embedded(embeds, words(7)), embedded(embeds, words(7), dimensions=size)
    assert len(cut) == size
    assert hypot(*cut) == pytest.approx(1.0, abs=1e-4)
    assert cosine(cut, whole[:size]) == pytest.approx(1.0, abs=1e-5)


LONG = words(LONGEST + 100)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": ["a", ""]}, "input[1]: is empty"),
    ({"input": [[5, 10**6]]}, "input[0]: 1000000 is not in the vocabulary"),
    ({"input": [words(3), LONG]}, "input[1]"),
    ({"input": [[5] * (LONGEST + 1)]}, "input[0]"),
    ({"input": LONG, "truncate_prompt_tokens": LONGEST + 1}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": ["a"] * 100_000}, "input: has 100000 items; a request may have 2048"),
    ({"input": "a", "dimensions": 17}, "dimensions: 17 is not one of 16, 32, 64"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_refused_by_name_and_the_engine_lives(
    embeds: Stack, body: dict[str, Any], message: str
) -> None:
    answer = embeds.post("/v1/embeddings", {"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["message"]
    assert len(embedded(embeds, "a")[0]) == SMALLER[-1]


def test_long_text_is_cut_when_asked(embeds: Stack) -> None:
    found = embeds.post(
        "/v1/embeddings", {"model": "tiny", "input": LONG, "truncate_prompt_tokens": -1}
    ).json()
    assert found["usage"]["prompt_tokens"] == LONGEST
    (short,) = embedded(embeds, LONG, extra_body={"truncate_prompt_tokens": 12})
    (same,) = embedded(embeds, words(10))
    assert cosine(short, same) == pytest.approx(1.0, abs=1e-5)


def test_a_client_that_leaves_frees_the_engine(embeds: Stack) -> None:
    worker = embeds.workers[0]
    body = {"model": "tiny", "input": [words(2000, number) for number in range(400)]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{embeds.url}/v1/embeddings", json=body, timeout=1.0)
    until("no request runs", lambda: worker.busy() == 0, 60)
    assert embedded(embeds, "a")


def test_bi_encoder_ranks_by_cosine(embeds: Stack, wanted: dict[str, Any]) -> None:
    check_ranking(embeds, wanted["score"])


def check_ranking(made: Stack, wanted: list[float], **more: Any) -> None:
    body = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS, **more}
    ranked = made.post("/v1/rerank", body).json()
    found = {item["index"]: item["score"] for item in ranked}
    assert [found[number] for number in range(len(wanted))] == pytest.approx(wanted, abs=1e-4)
    order = sorted(range(len(wanted)), key=lambda number: -wanted[number])
    assert [item["index"] for item in ranked] == order
    assert [item["document"] for item in ranked] == [DOCUMENTS[number] for number in order]
    best = made.post("/v1/rerank", {**body, "top_n": 3, "return_documents": False}).json()
    assert [set(item) for item in best] == [{"index", "score"}] * 3
    assert [item["index"] for item in best] == order[:3]


def test_cross_encoder_scores_equal_bare_vllm(start: Start, children: Children, tmp_path: Path) -> None:
    model = make_reranker(tmp_path / "reranker")
    child, made = (
        children.start("bare:pooling", str(model), {"score": [QUERY, DOCUMENTS]}),
        start(model=model),
    )
    wanted = child.answer()["score"]
    assert max(wanted) - min(wanted) > 0.1  # of equal scores any order would do
    check_ranking(made, wanted)
    for body, name in (
        ({"query": QUERY, "documents": ["a", LONG]}, "documents[1]"),
        ({"query": QUERY, "documents": []}, "ocuments"),  # the frontend refuses it
        ({"query": "", "documents": ["a"]}, "uery"),  # and this
        ({"query": QUERY, "documents": ["a"] * 100_000}, "documents: has 100000 items"),
    ):
        answer = made.post("/v1/rerank", {"model": "tiny", **body})
        assert answer.status_code == 400 and name in answer.json()["message"], answer.text


@pytest.mark.more
def test_classes_equal_bare_vllm(start: Start, children: Children, tmp_path: Path) -> None:
    model, texts = make_classifier(tmp_path / "classifier"), TEXTS[::20]
    child, made = children.start("bare:pooling", str(model), {"classify": texts}), start(model=model)
    wanted, answer = child.answer()["classify"], made.post("/v1/classify", {"model": "tiny", "input": texts})
    items = answer.json()["data"]
    assert [item["probs"] for item in items] == [pytest.approx(one, abs=1e-4) for one in wanted]
    best = [max(range(len(LABELS)), key=one.__getitem__) for one in wanted]
    assert [item["label"] for item in items] == [LABELS[number] for number in best]
    raw = made.post("/v1/classify", {"model": "tiny", "input": texts[0], "use_activation": False}).json()
    assert sum(raw["data"][0]["probs"]) != pytest.approx(1.0, abs=1e-3)
    refused = made.post("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b"]})
    assert refused.status_code in (400, 404)


@pytest.mark.more
def test_decoder_with_adapters_embeds_as_bare_vllm(
    start: Start, children: Children, adapters: dict[str, Path]
) -> None:
    texts = ["once upon a time", "the end", "a b c d e f g"]
    cases = {"embed": texts, "adapter": ["a", 1, str(adapters["a"])]}
    flags = {"enable_lora": True, "max_loras": 2}
    child = children.start("bare:pooling", str(start.model), cases, **flags)
    modules = ("--lora-modules", f"a={adapters['a']}", "--enable-lora", "--max-loras", "2")
    made = start("--runner", "pooling", *modules).wait_listed("a")
    wanted = child.answer()
    assert cosine(wanted["embed"][0], wanted["adapted"][0]) < 0.999
    for name, vectors in (("tiny", wanted["embed"]), ("a", wanted["adapted"])):
        answer = made.openai.embeddings.create(model=name, input=texts)
        assert min(map(cosine, (item.embedding for item in answer.data), vectors)) >= 0.9999, name


TEMPLATE = (
    "Instruct: {{ instruction | default('find it') }}\n"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}Answer:"
)


@pytest.mark.more
def test_reranker_of_qwen3_uses_its_template(start: Start, children: Children, tmp_path: Path) -> None:
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    template = tmp_path / "pair.jinja"
    template.write_text(TEMPLATE)
    documents = ["once upon a time", "the end", "a b c d e f g"]
    cases = {"score": ["a story", documents], "template": TEMPLATE}
    child = children.start("bare:pooling", str(start.model), cases, hf_overrides=overrides)
    flags = ("--hf-overrides", json.dumps(overrides), "--custom-jinja-template", str(template))
    made, wanted = start("--runner", "pooling", *flags), child.answer()["score"]
    ranked = made.post("/v1/rerank", {"model": "tiny", "query": "a story", "documents": documents}).json()
    scores = {item["index"]: item["score"] for item in ranked}
    assert [scores[number] for number in range(3)] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.more
def test_chats_with_pictures_are_embedded_as_bare_vllm_does(
    start: Start, children: Children, tmp_path: Path
) -> None:
    """The frontend refuses `messages`; a gateway sends them to the worker, as this test does."""
    model = make_tiny_vision_model(tmp_path / "model", "qwen2-vl")
    chats = [vision.chat([vision.image(vision.picture(seed)), vision.TEXT]) for seed in (1, 2)]
    chats.append(vision.chat([vision.TEXT]))
    child = children.start("bare:embedded_chats", str(model), chats)
    made = start.empty()
    worker = start.warm.start_worker(made, model, "--runner", "pooling", "--enable-multimodal")
    until("ready", worker.is_ready, 120)
    wanted = child.answer()
    assert cosine(wanted[0], wanted[1]) < 0.999
    with plane(made.environment()) as workers:
        for messages, vector in zip(chats, wanted, strict=True):
            answer = workers.call("backend.generate", {"_api": "embeddings", "messages": messages})
            assert cosine(answer["chunks"][0]["data"][0]["embedding"], vector) >= 0.9999
        outside = vision.chat([vision.image("file:///etc/passwd"), vision.TEXT])
        refused = workers.call("backend.generate", {"_api": "embeddings", "messages": outside})
        assert "file: is not allowed" in str(refused["error"])
