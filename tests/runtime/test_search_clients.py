"""Client libraries of docs/search.md: what each sends, and those of OpenAI and Cohere themselves."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import numpy as np
import openai
import pytest

from harness.served import Serving, served
from harness.several_kinds import groups, sound

NUMBERS = 997
"""Of an embedding of the fake engine."""
pytestmark = pytest.mark.filterwarnings("ignore")  # those of other people's packages


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("clients")
    with served(folder, "--config", str(groups(folder, "chat", "vectors", "ranker", "hears"))) as made:
        yield made


def post(running: Serving, path: str, body: dict[str, Any]) -> Any:
    headers = {"authorization": "Bearer none"}
    reply = httpx.post(running.url + path, json=body, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


# --- embeddings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a", ["a", "b"]])
def test_openai_and_langchain_and_llamaindex_ask_for_base64(running: Serving, given: Any) -> None:
    """langchain-openai 1.7 with check_embedding_ctx_length=False, llama-index-embeddings-openai(-like)."""
    found = post(running, "/v1/embeddings", {"model": "vectors", "input": given, "encoding_format": "base64"})
    assert [one["index"] for one in found["data"]] == list(range(len(given)))
    assert len(base64.b64decode(found["data"][0]["embedding"])) == 4 * NUMBERS


def test_langchain_asks_with_tokens_of_another_model_by_default(running: Serving) -> None:
    """Without check_embedding_ctx_length=False it sends ids of OpenAI's vocabulary."""
    body = {"model": "vectors", "input": [[15339, 1917]], "encoding_format": "base64"}
    reply = httpx.post(f"{running.url}/v1/embeddings", json=body, timeout=30)
    assert reply.status_code == 400 and "is not in the vocabulary" in reply.text


def test_openwebui_asks_for_floats(running: Serving) -> None:
    """RAG_EMBEDDING_ENGINE=openai sends input and model to RAG_OPENAI_API_BASE_URL + /embeddings."""
    found = post(running, "/v1/embeddings", {"input": ["a", "b"], "model": "vectors"})
    assert [len(one["embedding"]) for one in found["data"]] == [NUMBERS] * 2


def test_cohere_asks_on_its_own_path(running: Serving) -> None:
    body = {"texts": ["a", "b"], "model": "vectors", "input_type": "search_query"}
    found = post(running, "/v2/embed", {**body, "embedding_types": ["float"]})
    assert [len(one) for one in found["embeddings"]["float"]] == [NUMBERS] * 2


def test_openai_library_gets_shorter_vectors(running: Serving) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        whole = client.embeddings.create(model="vectors", input=["a", "b"])
        short = client.embeddings.create(model="vectors", input="a", dimensions=16)
    assert [len(one.embedding) for one in (*whole.data, *short.data)] == [NUMBERS, NUMBERS, 16]


# --- rankings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"top_n": 1}, {"top_n": 2}])
def test_jinas_clients_and_openwebui_rank(running: Serving, more: dict[str, Any]) -> None:
    """JinaRerank of LangChain and of LlamaIndex; RAG_EXTERNAL_RERANKER_URL of Open WebUI."""
    body = {"model": "ranker", "query": "abc", "documents": ["xyz", "abc"], **more}
    found = post(running, "/v1/rerank", body)["results"]
    assert len(found) == more["top_n"] and found[0]["index"] == 1 and found[0]["relevance_score"] == 1.0


@pytest.mark.parametrize("more", [{}, {"max_tokens_per_doc": None}])
def test_coheres_client_and_that_of_langchain_rank(running: Serving, more: dict[str, Any]) -> None:
    body = {"model": "ranker", "query": "abc", "documents": ["xyz", "abc"], "top_n": 1, **more}
    assert post(running, "/v2/rerank", body)["results"] == [{"index": 1, "relevance_score": 1.0}]


# --- speech -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["json", "text", "srt", "vtt", "verbose_json"])
def test_openai_library_transcribes(running: Serving, shape: Any) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        found: Any = client.audio.transcriptions.create(
            model="hears", file=("a.wav", sound()), response_format=shape
        )
    assert found if isinstance(found, str) else found.text


# --- the libraries ----------------------------------------------------------------------------------------


def test_cohere_ranks_and_embeds(running: Serving) -> None:
    with httpx.Client() as http:  # Cohere's own stays open
        client = cohere.ClientV2(api_key="none", base_url=running.url, httpx_client=http)
        ranked = client.rerank(model="ranker", query="abc", documents=["xyz", "abc"], top_n=1)
        assert [item.index for item in ranked.results] == [1]
        embedded = client.embed(
            texts=["a", "b"], model="vectors", input_type="search_query", embedding_types=["float"]
        )
    assert [len(vector) for vector in embedded.embeddings.float_ or ()] == [NUMBERS] * 2


# --- a store in a file ------------------------------------------------------------------------------------


def test_vectors_in_a_file_find_a_text(running: Serving, tmp_path: Path) -> None:
    """As docs/search.md writes it."""
    texts = ["cats and dogs", "ships at sea", "trees in a wood"]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:

        def embed(some: list[str]) -> Any:
            found = client.embeddings.create(model="vectors", input=some).data
            made = np.asarray([one.embedding for one in found], np.float32)
            return made / np.linalg.norm(made, axis=1, keepdims=True)

        np.savez(tmp_path / "store.npz", texts=texts, vectors=embed(texts))
        store = np.load(tmp_path / "store.npz")
        scores = store["vectors"] @ embed(["a ship on the sea"])[0]
    assert store["texts"][int(scores.argmax())] == "ships at sea"


def test_base64_is_little_endian_floats(running: Serving) -> None:
    as_floats = post(running, "/v1/embeddings", {"model": "vectors", "input": "a"})["data"][0]["embedding"]
    body = {"model": "vectors", "input": "a", "encoding_format": "base64"}
    packed = base64.b64decode(post(running, "/v1/embeddings", body)["data"][0]["embedding"])
    assert struct.unpack(f"<{NUMBERS}f", packed) == pytest.approx(as_floats)
