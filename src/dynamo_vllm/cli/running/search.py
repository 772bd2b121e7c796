"""Runs `dynamo-vllm search`: finds pages with embeddings, orders them with a reranker, lets a chat model
answer.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_vllm.cli.running import deployment, search_passages, search_vectors
from dynamo_vllm.cli.running.chat import text_of
from dynamo_vllm.config import build, folders
from dynamo_vllm.config.options.search import SearchOptions
from dynamo_vllm.config.rules import bounds
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.models import demo
from dynamo_vllm.observe.frontend_client import (
    DEFAULT_URL,
    FrontendClient,
    Unanswered,
    answered,
    harmless,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dynamo_vllm.cli.running.search_passages import Passage

T = TypeVar("T")
PROG = "dynamo-vllm search"
DESCRIPTION = """\
Ask the documentation, or a folder of texts, through a running system: an embedding model finds pages, a
reranker orders them, a chat model answers from the best. The question and the URL may come without flags.

  dynamo-vllm serve --demo search
  dynamo-vllm search "How do I load an adapter?"
  dynamo-vllm search "When do we ship?" --folder notes --embed-model qwen3-embedding"""
NOT_FOUND = 404
_URL = re.compile(r"https?://\S+|[\w.\[\]:-]+:\d+(/\S*)?")
_TOOL = {
    "type": "function",
    "function": {
        "name": "search_docs",
        "description": "Search the pages that answer the user's question.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for"}},
            "required": ["query"],
        },
    },
}
_FROM_PAGES = (
    "Answer the question in one or two sentences from these passages, and name the page that says so. If "
    "they do not answer it, say so."
)
ANSWER_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Page:
    """A page that was found, with its best passage."""

    page: str
    title: str
    text: str
    score: float
    """The reranker's, or the cosine without one."""

    @property
    def whole(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class Found:
    question: str
    query: str
    """What was looked for; the chat model may have put it in other words."""
    pages: Sequence[Page]
    answer: str | None
    answer_source: str | None
    """From what the chat model answered: the pages, or what it was trained on."""
    models: Mapping[str, str]
    passages: int
    seconds: float


def main(argv: Sequence[str]) -> int:
    environment = build.environment()
    options, rest = build.parse(SearchOptions, with_flags(argv), environment, PROG, DESCRIPTION)
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of search; see '{PROG} --help'")
    if not (options.question or "").strip():
        raise ConfigError(f'the question is missing; write {PROG} "How do I load an adapter?"')
    bounds.at_least(options, 1, "top", "candidates")
    passages = search_passages.read(options.folder)
    url = options.url or deployment.frontend(environment) or DEFAULT_URL
    with contextlib.closing(FrontendClient(url, options.timeout)) as client:
        cache = folders.cache(environment) / "dynamo-vllm" / "search"
        found = Search(client, options, passages, cache).run(str(options.question).strip())
    print(json.dumps(asdict(found), indent=2, ensure_ascii=False) if options.json else text(found))
    return 0


def with_flags(argv: Sequence[str]) -> list[str]:
    """Write --url and --question before the first words if these are no flags."""
    words = list(argv)
    made: list[str] = []
    while words and not words[0].startswith("-") and len(made) < 4:
        word = words.pop(0)
        flag = "--url" if _URL.fullmatch(word) else "--question"
        if flag in made:
            raise ConfigError(f"{word!r} is one word too many; put the question in quotes")
        made += [flag, word]
    return [*made, *words]


class Search:
    """One question."""

    def __init__(
        self, client: FrontendClient, options: SearchOptions, passages: Sequence[Passage], cache: Path
    ) -> None:
        self._client = client
        self._options = options
        self._passages = passages
        self._cache = cache
        self._served = Served(client)
        self._used: dict[str, str] = {}

    def run(self, question: str) -> Found:
        began = time.monotonic()
        asked = self._tool_call(question) if self._options.chat else None
        query = question if asked is None else asked.query
        pages = self._ordered(query, self._nearest(query))[: self._options.top]
        answer, source = self._answer(question, pages, asked)
        return Found(
            question,
            query,
            pages,
            answer,
            source,
            self._used,
            len(self._passages),
            round(time.monotonic() - began, 3),
        )

    # --- the pages --------------------------------------------------------------------------------------

    def _nearest(self, query: str) -> list[Page]:
        """Return the nearest pages by the cosine of their best passage."""
        import numpy as np

        asked = f"{self._options.instruction or ''}{query}"
        names = self._served.for_embeddings(self._options.embed_model)
        name, vector = first_that_can(
            names, lambda one: search_vectors.Embedder(self._client, one).embed([asked])[0], "embeddings"
        )
        self._used["embeddings"] = name
        embedder = search_vectors.Embedder(self._client, name)
        texts = [one.whole for one in self._passages]
        vectors, _ = search_vectors.of_passages(embedder, texts, self._cache, self._progress)
        cosines = vectors @ vector
        best: dict[str, Page] = {}
        for index in np.argsort(-cosines, kind="stable"):
            one = self._passages[int(index)]
            if one.page not in best:
                best[one.page] = Page(one.page, one.title, one.text, round(float(cosines[index]), 4))
            if len(best) == self._options.candidates:
                break
        return list(best.values())

    def _progress(self, done: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == len(self._passages) else ""
            print(
                f"\rembedding {done} of {len(self._passages)} passages", end=end, file=sys.stderr, flush=True
            )

    def _ordered(self, query: str, pages: Sequence[Page]) -> list[Page]:
        """Return the pages in the reranker's order; as they are if there is no reranker."""
        names = self._served.for_ranking(self._options.rerank_model, self._used["embeddings"])
        if not self._options.rerank or not names:
            return list(pages)
        documents = [page.whole for page in pages]
        try:
            name, scores = first_that_can(names, lambda one: self._scores(one, query, documents), "reranking")
        except NoModel:
            if self._options.rerank_model is not None:
                raise
            return list(pages)
        self._used["reranking"] = name
        order = sorted(range(len(pages)), key=lambda index: -scores[index])
        return [
            Page(pages[i].page, pages[i].title, pages[i].text, round(scores[i], 4))
            for i in order
            if i in scores
        ]

    def _scores(self, model: str, query: str, documents: Sequence[str]) -> dict[int, float]:
        """Return the score of each document, from a gateway's answer or from a frontend's."""
        body: dict[str, object] = {"model": model, "query": query, "documents": list(documents)}
        found = answered(self._client.post("/v1/rerank", body))
        items = found if isinstance(found, list) else found["results"]
        return {int(one["index"]): float(one.get("relevance_score", one.get("score", 0.0))) for one in items}

    # --- the answer -------------------------------------------------------------------------------------

    def _tool_call(self, question: str) -> ToolCall | None:
        """Let the chat model say what to look for; None if it does not call the tool, or there is none."""
        names = self._served.for_chat(self._options.chat_model)
        if not names or names[0] == DEMO_CHAT:  # which knows tools for weather, time and sums only
            return None
        body = {"messages": [_user(question)], "tools": [_TOOL], "max_tokens": ANSWER_TOKENS}
        try:
            name, message = first_that_can(names, lambda one: self._chat(one, body), "chat")
        except NoModel:
            return None
        except Unanswered as exc:  # without a parser for tool calls, for example
            if exc.status is None or exc.status >= 500:
                raise
            return None
        self._used["chat"] = name
        for call in message.get("tool_calls") or ():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                query = json.loads(call["function"]["arguments"]).get("query")
                if isinstance(query, str) and query.strip():
                    return ToolCall(str(call.get("id")), message, query.strip())
        return None

    def _answer(
        self, question: str, pages: Sequence[Page], asked: ToolCall | None
    ) -> tuple[str | None, str | None]:
        names = self._served.for_chat(self._options.chat_model)
        if not self._options.chat or not names:
            return None, None
        read = "\n\n".join(f"{page.page}: {page.whole}" for page in pages)
        if asked is not None:
            tool = {"role": "tool", "tool_call_id": asked.id, "content": read}
            said = {"role": "assistant", "content": "", "tool_calls": asked.message["tool_calls"]}
            messages = [_user(question), said, tool]
        elif names[0] == DEMO_CHAT:
            messages = [_user(question)]  # it was not trained to read passages
        else:
            messages = [{"role": "system", "content": f"{_FROM_PAGES}\n\n{read}"}, _user(question)]
        names = [self._used["chat"]] if "chat" in self._used else names
        body: dict[str, Any] = {"messages": messages, "max_tokens": ANSWER_TOKENS}
        if asked is not None:
            body["tools"] = [_TOOL]
        if names[0] == DEMO_CHAT:
            body["temperature"] = 0
        try:
            name, message = first_that_can(names, lambda one: self._chat(one, body), "chat")
        except NoModel:
            if self._options.chat_model is not None:
                raise
            return None, None
        self._used["chat"] = name
        return text_of(message.get("content")).strip() or None, ("training" if name == DEMO_CHAT else "pages")

    def _chat(self, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
        found = self._client.ask("/v1/chat/completions", {"model": model, **body})
        message: dict[str, Any] = found["choices"][0]["message"]
        return message


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    message: Mapping[str, Any]
    query: str


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


# --- which models -----------------------------------------------------------------------------------------

DEMO_CHAT, DEMO_EMBED, DEMO_RERANK = (demo.served_name(name) for name in ("chat", "embed", "rerank"))


class NoModel(Unanswered):
    """No served model has an API."""


class Served:
    """The models of a server. A gateway says what each is for; at a frontend, several are tried."""

    def __init__(self, client: FrontendClient) -> None:
        self._listed = {str(one["id"]): one for one in client.models()}

    def for_embeddings(self, named: str | None) -> list[str]:
        return self._choose(named, DEMO_EMBED, lambda apis: "embeddings" in apis)

    def for_ranking(self, named: str | None, embedder: str) -> list[str]:
        """Leave out models for embeddings: their ranking is the one that is there already."""
        found = self._choose(named, DEMO_RERANK, lambda apis: "rerank" in apis and "embeddings" not in apis)
        return [name for name in found if name != embedder or name == named]

    def for_chat(self, named: str | None) -> list[str]:
        return self._choose(named, DEMO_CHAT, lambda apis: "chat" in apis)

    def _choose(self, named: str | None, first: str, fits: Callable[[Any], bool]) -> list[str]:
        if named is not None:
            return [named]
        others = (DEMO_CHAT, DEMO_EMBED, DEMO_RERANK)
        found = [
            name
            for name, one in self._listed.items()
            if (fits(one["apis"]) if "apis" in one else name == first or name not in others)
        ]
        return sorted(found, key=lambda name: (name != first, name))


def first_that_can(names: Sequence[str], ask: Callable[[str], T], purpose: str) -> tuple[str, T]:
    """Return the first model that answers, and its answer."""
    for name in names:
        try:
            return name, ask(name)
        except Unanswered as exc:
            if exc.status != NOT_FOUND:
                raise
    tried = f" (tried {', '.join(names)})" if names else ""
    raise NoModel(f"no model for {purpose} is served{tried}; 'dynamo-vllm serve --demo search' has one")


# --- text -------------------------------------------------------------------------------------------------


def text(found: Found) -> str:
    return harmless("\n".join(lines(found)))


def lines(found: Found) -> Iterator[str]:
    if found.query != found.question:
        yield f"{found.models['chat']} looks for: {found.query}\n"
    for number, page in enumerate(found.pages, 1):
        yield f"{number}. {page.score:6.3f}  {page.page}  {page.title}".rstrip()
        yield f"           {textwrap.shorten(page.text, 96, placeholder=' …')}"
    if found.answer:
        name = found.models["chat"]
        from_where = "" if found.answer_source == "pages" else " (from its training; it cannot read pages)"
        yield f"\n{name}{from_where}: {found.answer}"
    who = ", ".join(f"{purpose} by {name}" for purpose, name in found.models.items())
    yield f"\n{found.passages} passages, {who}: {found.seconds:.1f} s"
