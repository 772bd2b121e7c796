"""Makes demo-embed and demo-rerank: tokenizer, both trainings, folders, scores and cards."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo.search import card, export, pairs, passages, score, served, tokens, wordings, words
from demo.search.bert import Bert, Reranker, Shape, parameters
from demo.search.export import EMBED, RERANK
from demo.search.passages import Passage
from demo.search.questions import LATER, Question, held_out, read, trained
from demo.search.rerank import begin, train_reranker
from demo.train import Curve, Plan

LATER_ONES = "; questions written later"
WORDS_TIME = 0.3
"""Of a time limit; the rest is the reranker's."""


@dataclass(frozen=True)
class SearchSize:
    """How big everything is."""

    shape: Shape = Shape()
    vocabulary: int = tokens.VOCABULARY
    dropout: float = 0.3
    reranker_dropout: float = 0.1
    words: Plan = Plan(steps=500, step_tokens=1, rate=3e-3, warm_up=50, decay=2.0, report_every=50)
    asked: int = 128
    made: int = 64
    """Questions of a step of the embedder: hand-written ones, and ones made from passages."""
    rerank: Plan = Plan(steps=800, step_tokens=1, rate=1e-3, warm_up=50, decay=0.5, report_every=50)
    scored: int | None = None
    """Held-out questions; all of them if None."""


FULL = SearchSize()
SMOKE = SearchSize(
    shape=Shape(hidden_size=128, intermediate_size=64),
    vocabulary=1500,
    words=Plan(steps=8, step_tokens=1, rate=3e-3, warm_up=2, report_every=2),
    asked=16,
    made=16,
    rerank=Plan(steps=4, step_tokens=1, rate=5e-4, warm_up=2, report_every=2),
    scored=20,
)


def with_limit(size: SearchSize, minutes: float | None) -> SearchSize:
    """Both trainings within so many minutes."""
    if minutes is None:
        return size
    return dataclasses.replace(
        size,
        words=dataclasses.replace(size.words, minutes=minutes * WORDS_TIME),
        rerank=dataclasses.replace(size.rerank, minutes=minutes * (1 - WORDS_TIME)),
    )


def make_search(out: Path, size: SearchSize, seed: int, device: str, command: str) -> tuple[Path, Path]:
    """Make both models in `out`, with their cards and the passages to search in."""
    return make_embedder(out, size, seed, device, command), make_reranker(out, size, seed, device, command)


def make_embedder(out: Path, size: SearchSize, seed: int, device: str, command: str) -> Path:
    found, questions = passages.read(), read()
    tokenizer = tokens.learn(_texts(found, questions), size.vocabulary)
    source = pairs.Source(found, questions, seed)
    torch.manual_seed(seed)
    shape = dataclasses.replace(size.shape, vocab_size=tokenizer.get_vocab_size())
    model = Bert(shape, size.dropout).to(device)
    print(f"{len(found)} passages, {len(source.questions)} questions and phrases to train on", flush=True)
    print(f"{EMBED}: {parameters(model) / 1e6:.2f} M parameters on {device}", flush=True)
    plan = dataclasses.replace(size.words, seed=seed)
    curve = words.train_words(model, tokenizer, found, source, plan, size.asked, size.made)
    folder = export.save_embedder(model, tokenizer, out / EMBED)
    passages.write(found, folder)
    _record(out / f"{EMBED}.json", model, plan, curve, len(source.questions), len(found), command)
    return folder


def make_reranker(out: Path, size: SearchSize, seed: int, device: str, command: str) -> Path:
    """Make the reranker for the embedder that is in `out`, and score both."""
    embedder, tokenizer = export.load_embedder(out / EMBED, device)
    found = passages.load(out / EMBED)
    source = pairs.Source(found, read(), seed)
    torch.manual_seed(seed)
    width = embedder.shape.hidden_size
    shape = dataclasses.replace(embedder.shape, hidden_size=2 * width, intermediate_size=4 * width)
    model = Reranker(shape, size.reranker_dropout).to(device)
    begin(model, embedder)
    print(f"{RERANK}: {parameters(model) / 1e6:.2f} M parameters on {device}", flush=True)
    plan = dataclasses.replace(size.rerank, seed=seed)
    curve = train_reranker(model, embedder, tokenizer, found, source, plan)
    folder = export.save_reranker(model, tokenizer, out / RERANK)
    _record(out / f"{RERANK}.json", model, plan, curve, len(source.questions), len(found), command)
    scores = score_folders(out / EMBED, folder, device, size.scored)
    tell(scores)
    keep(out, scores, "in torch")
    return folder


def _texts(found: Sequence[Passage], questions: Sequence[Question]) -> list[str]:
    lists = [file.read_text(encoding="utf-8") for file in (wordings.FILE, pairs.TOPICS)]
    return [*(one.whole for one in found), *(one.text for one in trained(questions)), *lists, *lists]


def score_folders(
    embedder: Path, reranker: Path | None, device: str = "cpu", count: int | None = None
) -> list[score.SearchScore]:
    """Score folders in torch."""
    embed = score.embedding(*export.load_embedder(embedder, device))
    rerank = score.reranking(*export.load_reranker(reranker, device)) if reranker else None
    return _score(passages.load(embedder), embed, rerank, count)


def score_in_vllm(embedder: Path, reranker: Path | None, count: int | None = None) -> list[score.SearchScore]:
    """Score folders with vLLM in this process."""
    rerank = served.reranking_in_vllm(reranker) if reranker else None
    return _score(passages.load(embedder), served.embedding_in_vllm(embedder), rerank, count)


def score_over_http(url: str, found: Sequence[Passage], count: int | None = None) -> list[score.SearchScore]:
    """Score what a server has under the names of the models."""
    return _score(found, served.embedding(url, EMBED), served.reranking(url, RERANK), count)


def _score(
    found: Sequence[Passage], embed: score.Embed, rerank: score.Rerank | None, count: int | None
) -> list[score.SearchScore]:
    scores = score.score(found, held_out(read())[:count], embed, rerank, words.DIMENSIONS)
    later = score.score(found, read(LATER)[:count], embed, rerank)
    return scores + [dataclasses.replace(one, name=f"{one.name}{LATER_ONES}", needed=None) for one in later]


def beside(embedder: Path) -> Path | None:
    """Return the folder of the reranker that lies beside the embedder's."""
    name = embedder.resolve().name.replace("embed", "rerank")
    found = embedder.resolve().parent / name
    return found if (found / "config.json").is_file() else None


def tell(scores: Sequence[score.SearchScore]) -> None:
    print(score.table(scores), flush=True)
    for one in scores:
        for asked, wanted, first in one.wrong[:2]:
            print(f"  {one.name}: {asked!r}\n    wanted {wanted}, first is {first}", flush=True)


def keep(out: Path, scores: Sequence[score.SearchScore], how: str) -> None:
    """Write scores into the records and cards of both models."""
    for name in (EMBED, RERANK):
        record = out / f"{name}.json"
        if not record.is_file():
            continue
        found = json.loads(record.read_bytes())
        found["scores"], found["scored"] = [dataclasses.asdict(one) for one in scores], how
        _write(record, found)
        card.write(record, out / name)


def _record(
    path: Path,
    model: Bert | Reranker,
    plan: Plan,
    curve: Curve,
    questions: int,
    passages: int,
    command: str,
) -> None:
    """Write all that a card tells."""
    on_gpu = next(model.parameters()).is_cuda
    found = {
        "command": command,
        "questions": questions,
        "passages": passages,
        "seed": plan.seed,
        "parameters": parameters(model),
        "device": torch.cuda.get_device_name() if on_gpu else "one thread of a CPU",
        "torch": torch.__version__,
        "shape": dataclasses.asdict(model.shape),
        "plan": dataclasses.asdict(plan) | {"minutes": None if math.isinf(plan.minutes) else plan.minutes},
        "curve": dataclasses.asdict(curve),
    }
    _write(path, found)


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
