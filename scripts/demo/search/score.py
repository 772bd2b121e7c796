"""Scores search over the documentation: is the right page among the first for a held-out question?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo.search.bert import Bert, Reranker, Rows
from demo.search.passages import Passage
from demo.search.questions import Question

CANDIDATES = 10
"""Pages that the reranker puts in order, each by its best passage."""
NEEDED = 0.9
"""Of the questions: the right page is among the first three."""
EMBED, RERANK = "demo-embed", "demo-embed, then demo-rerank"

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts to vectors of length 1."""
Rerank = Callable[[str, Sequence[str]], Sequence[float]]
"""A question and passages to a number for each."""


@dataclass
class SearchScore:
    name: str
    count: int
    first: int = 0
    first_three: int = 0
    needed: float | None = None
    """The share of questions whose page must be among the first three."""
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    """Some whose page was not among the first three: question, right page, first page."""

    def is_enough(self) -> bool:
        return self.first_three >= (self.needed or 0) * self.count

    def judge(self, question: Question, pages: Sequence[str]) -> None:
        self.first += pages[0] in question.pages
        if set(pages[:3]) & set(question.pages):
            self.first_three += 1
        elif len(self.wrong) < 5:
            self.wrong.append((question.text, question.pages[0], pages[0]))


def best_of_pages(
    likeness: Sequence[float] | NDArray[np.float32], passages: Sequence[Passage]
) -> dict[str, int]:
    """Return by page the passage that is most alike, the best page first."""
    best: dict[str, int] = {}
    for index in np.argsort(-np.asarray(likeness), kind="stable"):
        best.setdefault(passages[index].page, int(index))
    return best


def score(
    passages: Sequence[Passage],
    questions: Sequence[Question],
    embed: Embed,
    rerank: Rerank | None = None,
    sizes: Sequence[int] = (),
) -> list[SearchScore]:
    """Score the embedder, with its first numbers alone too, and the reranker on what the embedder finds."""
    places = embed([one.whole for one in passages])
    asked = embed([one.text for one in questions])
    whole = places.shape[1]
    scores = []
    for size in (whole, *(size for size in sizes if size < whole)):
        name = EMBED if size == whole else f"{EMBED}, {size} of {whole} numbers"
        result = SearchScore(name, len(questions), needed=NEEDED if size == whole else None)
        likeness = _unit(asked[:, :size]) @ _unit(places[:, :size]).T
        for question, row in zip(questions, likeness, strict=True):
            result.judge(question, list(best_of_pages(row, passages)))
        scores.append(result)
    if rerank is not None:
        result = SearchScore(RERANK, len(questions), needed=NEEDED)
        for question, row in zip(questions, asked @ places.T, strict=True):
            found = list(best_of_pages(row, passages).items())[:CANDIDATES]
            order = np.argsort(-np.asarray(rerank(question.text, [passages[at].whole for _, at in found])))
            result.judge(question, [found[place][0] for place in order])
        scores.insert(1, result)
    return scores


def table(scores: Sequence[SearchScore]) -> str:
    lines = ["| ranked by | right page first | among the first three | needed |", "|---|---|---|---|"]
    for one in scores:
        needed = "" if one.needed is None else f"{one.needed:.0%}"
        lines.append(
            f"| {one.name} | {one.first / one.count:.1%} | {one.first_three / one.count:.1%} of {one.count} "
            f"| {needed} |"
        )
    return "\n".join(lines)


def embedding(model: Bert, tokenizer: Tokenizer, rows: int = 64) -> Embed:
    """Embed in torch."""

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        model.eval()
        device = model.embeddings.LayerNorm.weight.device.type
        ids = [one.ids for one in tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        found = np.zeros((len(ids), model.shape.hidden_size), np.float32)
        for start in range(0, len(order), rows):
            part = order[start : start + rows]
            batch = Rows.of([ids[index] for index in part], device=device)
            with torch.no_grad():
                found[part] = model.embed(batch).float().cpu().numpy()
        return found

    return embed


def reranking(model: Reranker, tokenizer: Tokenizer) -> Rerank:
    """Rerank in torch."""

    def rerank(question: str, texts: Sequence[str]) -> Sequence[float]:
        model.eval()
        found = tokenizer.encode_batch([(question, text) for text in texts])
        device = model.classifier.weight.device.type
        rows = Rows.of([one.ids for one in found], [one.type_ids for one in found], device)
        with torch.no_grad():
            numbers: list[float] = torch.sigmoid(model(rows)).tolist()
        return numbers

    return rerank


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit
