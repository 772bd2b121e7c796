"""A chat, an embedding and a rerank model in one `serve`, which starts a gateway for them by itself.

Client libraries of docs/search.md: what each sends, and those of OpenAI and Cohere themselves.
"""

from __future__ import annotations

import base64
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import cohere
import httpx
import openai
import pytest

from harness import commands
from harness.served import Serving, own_environment, served
from harness.several_kinds import groups, sound

NUMBERS = 997
"""Of an embedding of the fake engine."""
pytestmark = pytest.mark.filterwarnings("ignore")  # those of other people's packages


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("search")
    with served(folder, "--config", str(groups(folder, "chat", "vectors", "ranker", "hears"))) as made:
        yield made


@pytest.fixture(scope="module")
def client(running: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as made:
        yield made


def command(running: Serving, *words: str) -> subprocess.CompletedProcess[str]:
    return commands.run(own_environment(running.output.parent), *words, seconds=120)


def post(running: Serving, path: str, **body: Any) -> Any:
    headers = {"authorization": "Bearer anything"}
    reply = httpx.post(f"{running.url}{path}", json=body, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_gateway_without_keys_is_started_and_said(running: Serving) -> None:
    said = running.process.written()
    assert said.count("a gateway without keys is started for ranker, hears") == 1
    assert "model=chat,vectors(embeddings),ranker(rerank),hears(transcription) workers=4" in said


def test_every_model_says_what_it_is_for(running: Serving) -> None:
    listed = httpx.get(f"{running.url}/v1/models", timeout=30).json()["data"]
    kinds = {"chat": "generate", "vectors": "pooling", "ranker": "pooling", "hears": "transcription"}
    assert {one["id"]: one["kind"] for one in listed} == kinds


# --- what client libraries send ---------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a", ["a", "b"]])
def test_openai_and_langchain_and_llamaindex_ask_for_base64(running: Serving, given: Any) -> None:
    """langchain-openai 1.7 with check_embedding_ctx_length=False, llama-index-embeddings-openai(-like)."""
    found = post(running, "/v1/embeddings", model="vectors", input=given, encoding_format="base64")["data"]
    as_floats = post(running, "/v1/embeddings", model="vectors", input=given)["data"]  # so does Open WebUI
    assert [one["index"] for one in found] == list(range(len(given)))
    for packed, plain in zip(found, as_floats, strict=True):
        numbers = struct.unpack(f"<{NUMBERS}f", base64.b64decode(packed["embedding"]))
        assert numbers == pytest.approx(plain["embedding"])


def test_openai_library_gets_shorter_vectors(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="vectors", input=["a", "b"])
    short = client.embeddings.create(model="vectors", input="a", dimensions=16)
    assert [len(one.embedding) for one in (*whole.data, *short.data)] == [NUMBERS, NUMBERS, 16]


@pytest.mark.parametrize("more", [{"top_n": 1}, {"top_n": 2}])
def test_jinas_clients_and_openwebui_rank(running: Serving, more: dict[str, Any]) -> None:
    """JinaRerank of LangChain and of LlamaIndex; RAG_EXTERNAL_RERANKER_URL of Open WebUI."""
    asked = {"model": "ranker", "query": "abc", "documents": ["xyz", "abc"], **more}
    found = post(running, "/v1/rerank", **asked)["results"]
    assert len(found) == more["top_n"] and found[0]["index"] == 1 and found[0]["relevance_score"] == 1.0


def test_cohere_ranks_and_embeds(running: Serving) -> None:
    with httpx.Client() as http:  # Cohere's own stays open
        cohere_client = cohere.ClientV2(api_key="none", base_url=running.url, httpx_client=http)
        ranked = cohere_client.rerank(model="ranker", query="abc", documents=["xyz", "abc"], top_n=1)
        assert [item.index for item in ranked.results] == [1]
        embedded = cohere_client.embed(
            texts=["a", "b"], model="vectors", input_type="search_query", embedding_types=["float"]
        )
    assert [len(vector) for vector in embedded.embeddings.float_ or ()] == [NUMBERS] * 2
    asked: dict[str, Any] = {"model": "ranker", "query": "abc", "documents": ["xyz", "abc"], "top_n": 1}
    found = post(running, "/v2/rerank", **asked, max_tokens_per_doc=None)  # as LangChain's sends it
    assert found["results"] == [{"index": 1, "relevance_score": 1.0}]


@pytest.mark.parametrize("shape", ["json", "srt"])
def test_openai_library_transcribes(client: openai.OpenAI, shape: Any) -> None:
    create = client.audio.transcriptions.create
    found: Any = create(model="hears", file=("a.wav", sound()), response_format=shape)
    assert found if isinstance(found, str) else found.text


# --- commands ---------------------------------------------------------------------------------------------


def test_nothing_is_booked_for_nobody(running: Serving) -> None:
    assert not list(running.output.parent.rglob("*.usage"))


@pytest.mark.more
def test_commands_of_this_machine_find_the_gateway(running: Serving) -> None:
    shown = command(running, "status")
    assert running.url in shown.stdout and shown.stdout.count("pooling") == 2
    assert "transcription" in shown.stdout
    refused = command(running, "chat", "--message", "Hello", "--model", "ranker")
    assert refused.returncode == 1 and "ranker does not chat" in refused.stderr
    assert command(running, "chat", "--message", "Hello").stdout.strip()


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vectors", "a vector of 997 numbers"),
        ("ranker", "a ranking from /v1/rerank"),
        ("hears", "a transcript"),
    ],
)
def test_check_proves_models_that_do_not_generate(running: Serving, name: str, words: str) -> None:
    found = command(running, "check", "--live", running.url, "--model", name)
    assert found.returncode == 0 and words in found.stdout, found.stdout
