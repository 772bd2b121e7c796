"""`search` against a server without engines: which models it asks, what it keeps, what it prints."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_vllm.cli import main as cli
from dynamo_vllm.cli.running import search, search_passages
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.models import demo
from harness.json_server import answering

Captured = pytest.CaptureFixture[str]

WORDS = ("cat", "dog", "ship", "sea", "tree")
APIS = {"chat": ["chat"], "vectors": ["embeddings", "rerank"], "ranker": ["classify", "rerank"]}


@dataclass
class Server:
    """How it behaves, and what it was asked."""

    models: dict[str, list[str]] = field(default_factory=lambda: dict(APIS))
    says_apis: bool = True
    bare_rankings: bool = False
    tool_query: str | None = None
    turned: bool = False
    """Whether the vectors are those of another model."""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    def listed(self) -> dict[str, Any]:
        return {
            "data": [{"id": n, **({"apis": a} if self.says_apis else {})} for n, a in self.models.items()]
        }

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if body is None:
            return 200, self.listed()
        api = {"/v1/embeddings": "embeddings", "/v1/rerank": "rerank", "/v1/chat/completions": "chat"}[path]
        if api not in self.models.get(body["model"], []):
            return 404, {"message": "Model not found"}
        self.asked.append((path, body))
        return 200, {"embeddings": self.embed, "rerank": self.rank, "chat": self.chat}[api](body)

    def embed(self, body: dict[str, Any]) -> dict[str, Any]:
        rows = [[float(text.count(word)) for word in WORDS] for text in body["input"]]
        if self.turned:
            rows = [row[::-1] for row in rows]
        coded = [base64.b64encode(np.asarray(row, np.float32).tobytes()).decode() for row in rows]
        return {"data": [{"index": i, "embedding": one} for i, one in enumerate(coded)]}

    def rank(self, body: dict[str, Any]) -> Any:
        scores = [float(len(text)) for text in body["documents"]]
        if self.bare_rankings:
            return [{"index": i, "score": score} for i, score in enumerate(scores)]
        return {"results": [{"index": i, "relevance_score": score} for i, score in enumerate(scores)]}

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "It is there."}
        if self.tool_query and body["messages"][-1]["role"] == "user":
            call = {"id": "c", "type": "function", "function": {"name": "search_docs"}}
            call["function"]["arguments"] = json.dumps({"query": self.tool_query})  # type: ignore[index]
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"choices": [{"message": message}]}

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with answering(server.answer) as server.url:
        yield server


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "notes"
    (folder / "inner").mkdir(parents=True)
    (folder / "animals.md").write_text("# Animals\n\n## Pets\n\ncat and dog\n\n## Wild\n\ntree cat\n")
    (folder / "inner/sea.txt").write_text("ship on the sea, far away from everything else\n")
    (folder / "wood.md").write_text("# Wood\n\ntree tree\n")
    (folder / "left.html").write_text("cat")
    return folder


def ask(server: Server, notes: Path, *words: str) -> int:
    return cli.run(["search", server.url, "cat or ship", "--folder", str(notes), *words])


def test_three_models_answer_together(server: Server, notes: Path, capsys: Captured) -> None:
    assert ask(server, notes) == 0
    said = capsys.readouterr().out
    first, _, second, *_ = said.splitlines()
    assert first.split()[2] == "inner/sea.txt" and second.split()[2:] == ["animals.md", "Pets"]
    assert "chat: It is there." in said
    assert "4 passages, chat by chat, embeddings by vectors, reranking by ranker" in said
    system, user = server.bodies("/v1/chat/completions")[-1]["messages"]
    assert "inner/sea.txt: ship on the sea" in system["content"], "for a model that calls no tool"
    assert user["content"] == "cat or ship"
    server.says_apis, server.bare_rankings = False, True
    assert ask(server, notes) == 0
    tried = capsys.readouterr().out
    assert "embeddings by vectors, reranking by ranker" in tried and "chat: It is there." in tried


def test_the_chat_model_may_say_what_to_look_for(server: Server, notes: Path, capsys: Captured) -> None:
    server.tool_query = "tree"
    assert ask(server, notes, "--no-rerank") == 0
    said = capsys.readouterr().out
    assert said.startswith("chat looks for: tree\n") and "1.  1.000  wood.md  Wood" in said
    last = server.bodies("/v1/chat/completions")[-1]["messages"]
    assert [one["role"] for one in last] == ["user", "assistant", "tool"]
    assert last[-1]["tool_call_id"] == "c" and last[-1]["content"].startswith("wood.md: Wood")


def test_demo_chat_gets_the_question_alone(server: Server, notes: Path, capsys: Captured) -> None:
    server.models = {"demo-chat": ["chat"], "vectors": APIS["vectors"]}
    assert ask(server, notes) == 0
    (body,) = server.bodies("/v1/chat/completions")
    assert body["messages"] == [{"role": "user", "content": "cat or ship"}]
    assert "demo-chat (from its training; it cannot read pages): It is there." in capsys.readouterr().out


@pytest.mark.parametrize(("turned", "counts"), [(False, [1, 4, 1, 1]), (True, [1, 4, 1, 1, 4])])
def test_vectors_of_passages_are_kept_unless_they_are_of_another_model(
    server: Server, notes: Path, turned: bool, counts: list[int]
) -> None:
    """The question, all passages; then the question, and one to compare."""
    ask(server, notes)
    server.turned = turned
    ask(server, notes)
    assert [len(body["input"]) for body in server.bodies("/v1/embeddings")] == counts


def test_without_other_models_the_nearest_pages_are_printed(
    server: Server, notes: Path, capsys: Captured
) -> None:
    server.models = {"vectors": APIS["vectors"]}
    assert ask(server, notes, "--top", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [page["page"] for page in found["pages"]] == ["animals.md"]
    assert found["answer"] is None and found["models"] == {"embeddings": "vectors"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--embed-model", "chat"), "no model for embeddings is served (tried chat)"),
        (("--rerank-model", "chat"), "no model for reranking is served (tried chat)"),
        (("--chat-model", "vectors"), "no model for chat is served (tried vectors)"),
        (("--top", "0"), "--top 0 must be 1 or more"),
        (("--folder", "/no/such"), "--folder /no/such: there is no such folder"),
    ],
)
def test_what_cannot_work_is_said(
    server: Server, notes: Path, words: tuple[str, ...], message: str, capsys: Captured
) -> None:
    assert ask(server, notes, *words) in (1, 2)
    assert message in capsys.readouterr().err


def test_words_without_flags() -> None:
    assert search.with_flags(["How?", "host:8000", "--json"]) == [
        *("--question", "How?", "--url", "host:8000", "--json")
    ]
    assert search.with_flags(["http://h/v1", "How?"]) == ["--url", "http://h/v1", "--question", "How?"]
    with pytest.raises(ConfigError, match="put the question in quotes"):
        search.with_flags(["How", "do"])


def test_documentation_that_is_not_there_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    with pytest.raises(ConfigError, match="name a folder of texts with --folder"):
        search_passages.read(None)
    (tmp_path / "embed").mkdir()
    one = {"page": "docs/a.md", "title": "A", "text": "b"}
    (tmp_path / "embed" / "passages.json").write_text(json.dumps([one]))
    assert search_passages.read(None) == [search_passages.Passage(**one)]


def test_long_texts_are_cut_between_words() -> None:
    made = list(
        search_passages.cut("p", "# T\n\n" + "word " * 1000 + "\n\n```\n# no heading\n```\n" + "x" * 2000)
    )
    assert all(len(one.text) <= search_passages.CHARACTERS + 1 for one in made)
    assert {one.title for one in made} == {"T"}
    assert sum(one.text.count("word") for one in made) == 1000
