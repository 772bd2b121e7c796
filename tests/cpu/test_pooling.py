"""Tests pooling models: embeddings, classes and scores equal those of bare vLLM, through the frontend."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import hypot
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_models.vision import make_tiny_vision_model
from tokenizers import Tokenizer

from cpu import pooled, vision
from harness.adapters import make_adapter
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
from harness.stack import Stack, environment, stack
from harness.waiting import until
from harness.warm import FORKED, Zygote

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
def embeds(warm: Zygote, embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("embeds")) as made:
        made.start_frontend()
        warm.start_worker(made, embedder)
        yield made.wait_ready(120)


def embedded(made: Stack, texts: Any, **more: Any) -> list[list[float]]:
    # The SDK asks for base64 and decodes it if no format is named.
    answer = made.openai.embeddings.create(model="tiny", input=texts, **more)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def cosine(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / (hypot(*one) * hypot(*other))


def test_embeddings_equal_bare_vllm_for_eight_clients_at_once(
    warm: Zygote, embedder: Path, embeds: Stack, tmp_path: Path
) -> None:
    wanted = pooled.reference(warm, embedder, {"embed": TEXTS}, tmp_path / "bare")
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


def test_formats_give_the_same_numbers(embeds: Stack) -> None:
    texts = [words(9, 1), words(2, 4)]
    body = {"model": "tiny", "input": texts}
    plain = embeds.post("/v1/embeddings", {**body, "encoding_format": "float"}).json()["data"]
    coded = embeds.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()["data"]
    for one, other in zip(plain, coded, strict=True):
        raw = base64.b64decode(other["embedding"])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(one["embedding"], abs=1e-7)
    assert embedded(embeds, texts) == [pytest.approx(one["embedding"], abs=1e-7) for one in plain]


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


def test_a_batch_of_the_largest_size_comes_whole_and_in_order(embeds: Stack) -> None:
    texts = [words(1 + number % 5, number) for number in range(2048)]
    found = embedded(embeds, texts)
    again = embedded(embeds, [texts[0], texts[1000], texts[2047]])
    assert [found[0], found[1000], found[2047]] == [pytest.approx(one, abs=1e-5) for one in again]


JSON = {"content-type": "application/json"}
LONG = words(LONGEST + 100)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input[0]: is empty"),
    ({"input": []}, "input: is empty"),
    ({"input": ["a", ""]}, "input[1]: is empty"),
    ({"input": [[]]}, "input[0]: is empty"),
    ({"input": [[5, 10**6]]}, "input[0]: 1000000 is not in the vocabulary"),
    ({"input": [words(3), LONG]}, "input[1]"),
    ({"input": [[5] * (LONGEST + 1)]}, "input[0]"),
    ({"input": LONG, "truncate_prompt_tokens": LONGEST + 1}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": ["a"] * 2049}, "input: has 2049 items; a request may have 2048"),
    ({"input": ["a"] * 100_000}, "input: has 100000 items"),
    ({"input": "a", "dimensions": 17}, "dimensions: 17 is not one of 16, 32, 64"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 10**9}, "dimensions"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_refused_by_name_and_the_engine_lives(
    embeds: Stack, body: dict[str, Any], message: str
) -> None:
    answer = embeds.post("/v1/embeddings", {"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["message"]
    assert len(embedded(embeds, "a")[0]) == SMALLER[-1]


def test_not_a_number_and_pictures_are_refused(embeds: Stack) -> None:
    picture = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}]}
    ]
    for raw in ('{"model":"tiny","input":"a","dimensions":NaN}', '{"model":"tiny","input":NaN}'):
        assert httpx.post(f"{embeds.url}/v1/embeddings", content=raw, headers=JSON).status_code == 400
    assert embeds.post("/v1/embeddings", {"model": "tiny", "input": picture}).status_code == 400
    assert embedded(embeds, "a")


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


def test_bi_encoder_ranks_by_cosine(warm: Zygote, embedder: Path, embeds: Stack, tmp_path: Path) -> None:
    wanted = pooled.reference(warm, embedder, {"score": [QUERY, DOCUMENTS]}, tmp_path / "bare")["score"]
    check_ranking(embeds, wanted)


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


def test_cross_encoder_scores_equal_bare_vllm(warm: Zygote, tmp_path: Path) -> None:
    model = make_reranker(tmp_path / "reranker")
    wanted = pooled.reference(warm, model, {"score": [QUERY, DOCUMENTS]}, tmp_path / "bare")["score"]
    assert max(wanted) - min(wanted) > 0.1  # of equal scores any order would do
    with stack(tmp_path / "stack") as made:
        made.start_frontend()
        warm.start_worker(made, model)
        made.wait_ready(120)
        check_ranking(made, wanted)
        long = made.post("/v1/rerank", {"model": "tiny", "query": QUERY, "documents": ["a", LONG]})
        assert long.status_code == 400 and "documents[1]" in long.json()["message"]
        for body, name in (
            ({"query": QUERY, "documents": []}, "ocuments"),  # the frontend refuses it
            ({"query": "", "documents": ["a"]}, "uery"),  # and this
            ({"query": QUERY, "documents": ["a"] * 100_000}, "documents: has 100000 items"),
        ):
            answer = made.post("/v1/rerank", {"model": "tiny", **body})
            assert answer.status_code == 400 and name in answer.json()["message"], answer.text


@pytest.mark.more
def test_classes_equal_bare_vllm(warm: Zygote, tmp_path: Path) -> None:
    model = make_classifier(tmp_path / "classifier")
    texts = TEXTS[::20]
    wanted = pooled.reference(warm, model, {"classify": texts}, tmp_path / "bare")["classify"]
    with stack(tmp_path / "stack") as made:
        made.start_frontend()
        warm.start_worker(made, model)
        made.wait_ready(120)
        answer = made.post("/v1/classify", {"model": "tiny", "input": texts}).json()
        assert [item["probs"] for item in answer["data"]] == [pytest.approx(one, abs=1e-4) for one in wanted]
        best = [max(range(len(LABELS)), key=one.__getitem__) for one in wanted]
        assert [item["label"] for item in answer["data"]] == [LABELS[number] for number in best]
        raw = made.post("/v1/classify", {"model": "tiny", "input": texts[0], "use_activation": False}).json()
        assert sum(raw["data"][0]["probs"]) != pytest.approx(1.0, abs=1e-3)
        refused = made.post("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b"]})
        assert refused.status_code in (400, 404)


@pytest.mark.more
def test_decoder_with_adapters_embeds_as_bare_vllm(warm: Zygote, model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", model, seed=1)
    texts = ["once upon a time", "the end", "a b c d e f g"]
    lora = {"enable_lora": True, "max_loras": 2}
    plain = pooled.reference(warm, model, {"embed": texts}, tmp_path / "bare", **lora)["embed"]
    case = {"embed": texts, "adapter": ["a", 1, str(adapter)]}
    adapted = pooled.reference(warm, model, case, tmp_path / "adapted", **lora)["embed"]
    assert cosine(plain[0], adapted[0]) < 0.999
    with stack(tmp_path / "stack") as made:
        made.start_frontend()
        modules = ("--lora-modules", f"a={adapter}", "--enable-lora", "--max-loras", "2")
        warm.start_worker(made, model, "--runner", "pooling", *modules)
        made.wait_ready(120)
        until("the adapter", lambda: "a" in made.models(), 30)
        for name, wanted in (("tiny", plain), ("a", adapted)):
            answer = made.openai.embeddings.create(model=name, input=texts)
            found = [item.embedding for item in answer.data]
            assert min(map(cosine, found, wanted)) >= 0.9999, name


TEMPLATE = (
    "Instruct: {{ instruction | default('find it') }}\n"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}Answer:"
)


@pytest.mark.more
def test_reranker_of_qwen3_uses_its_template(warm: Zygote, model: Path, tmp_path: Path) -> None:
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    template = tmp_path / "pair.jinja"
    template.write_text(TEMPLATE)
    documents = ["once upon a time", "the end", "a b c d e f g"]
    case = {"score": ["a story", documents], "template": TEMPLATE}
    wanted = pooled.reference(warm, model, case, tmp_path / "bare", hf_overrides=overrides)["score"]
    with stack(tmp_path / "stack") as made:
        made.start_frontend()
        flags = ("--hf-overrides", json.dumps(overrides), "--custom-jinja-template", str(template))
        warm.start_worker(made, model, "--runner", "pooling", *flags)
        made.wait_ready(120)
        ranked = made.post("/v1/rerank", {"model": "tiny", "query": "a story", "documents": documents}).json()
        found = {item["index"]: item["score"] for item in ranked}
        assert [found[number] for number in range(3)] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.more
def test_chats_with_pictures_are_embedded_as_bare_vllm_does(warm: Zygote, tmp_path: Path) -> None:
    """The frontend refuses `messages`; a gateway sends them to the worker, as this test does."""
    model = make_tiny_vision_model(tmp_path / "model", "qwen2-vl")
    chats = [vision.chat([vision.image(vision.picture(seed)), vision.TEXT]) for seed in (1, 2)]
    chats.append(vision.chat([vision.TEXT]))
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    bare = warm.fork(
        "cpu.pooled:run_chats",
        [str(model), str(tmp_path / "chats.json"), str(tmp_path / "out.json")],
        environment(tmp_path, **FORKED),
        tmp_path / "bare.log",
    )
    assert bare.wait(300) == 0, (tmp_path / "bare.log").read_text()[-3000:]
    wanted = json.loads((tmp_path / "out.json").read_text())
    assert cosine(wanted[0], wanted[1]) < 0.999
    with stack(tmp_path / "stack") as made:
        (tmp_path / "stack").mkdir()
        worker = warm.start_worker(made, model, "--runner", "pooling", "--enable-multimodal")
        until("ready", worker.is_ready, 120)
        with plane(made.environment()) as workers:
            for messages, vector in zip(chats, wanted, strict=True):
                answer = workers.call("backend.generate", {"_api": "embeddings", "messages": messages})
                found = answer["chunks"][0]["data"][0]["embedding"]
                assert cosine(found, vector) >= 0.9999
            outside = vision.chat([vision.image("file:///etc/passwd"), vision.TEXT])
            refused = workers.call("backend.generate", {"_api": "embeddings", "messages": outside})
            assert "file: is not allowed" in str(refused["error"])
