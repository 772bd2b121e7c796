"""Cards of demo-embed and demo-rerank, from the records of their making."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo.card import curve
from demo.search.export import EMBED
from demo.search.score import CANDIDATES, RERANK, SearchScore, table
from demo.search.words import DIMENSIONS

EMBEDDER = """\
# demo-embed

A BERT of {millions:.2f} M parameters, trained from nothing to show dynamo-vllm. It turns questions and
passages of this product's documentation into vectors of {width} numbers, so that a question lies near the
passage that answers it. vLLM serves it with `--runner pooling`; sentence-transformers reads it too. Mean
pooling, vectors of length 1, no prefixes, up to {context} tokens. Matryoshka: {sizes} numbers work as well.

`passages.json` has the {passages} passages that it was trained on: page, title and text. Embed the title, a
line end and the text.
"""
RERANKER = """\
# demo-rerank

A cross-encoder (BERT, {millions:.2f} M parameters), trained from nothing to show dynamo-vllm. It says how
well a passage of this product's documentation answers a question, from 0 to 1. vLLM serves it with
`--runner pooling` behind `/v1/rerank` and `/v1/score`. Up to {context} tokens, question and passage together.
It is meant to put in order what demo-embed has found, {candidates} pages or so.
"""
MAKING = """\
## How it was made
| | |
|---|---|
| data | {questions} questions and phrases of `scripts/demo/search`, in other words each time, and questions \
made from {passages} passages; seed {seed} |
| command | `{command}` |
| training | {steps} steps, rate {rate:g}, AdamW, cosine |
| time | {seconds:.0f} s on {device}, torch {torch}.{cut} |

![loss](curve.svg)
"""
SCORES = """\
## Scores
Measured {how}, on hand-written questions that are never trained on: the share for which the right page
comes first, and is among the first three different pages. A page counts by its best passage. The reranker
orders the first {candidates} pages of the embedder.

{table}
"""
LIMITS = """\
## Limits
It knows the words of this documentation, and questions like those it was trained on, in English. Other texts
mean little to it. It is for demonstrations and tests.
"""


def write(record: Path, folder: Path) -> Path:
    """Write README.md and curve.svg into the model's folder."""
    found = json.loads(record.read_bytes())
    intro = (EMBEDDER if folder.name == EMBED else RERANKER).format(
        millions=found["parameters"] / 1e6,
        width=found["shape"]["hidden_size"],
        context=found["shape"]["max_position_embeddings"],
        sizes=" and ".join(map(str, DIMENSIONS)),
        passages=found["passages"],
        candidates=CANDIDATES,
    )
    (folder / "curve.svg").write_text(curve(found["curve"]["points"], "loss per question"), encoding="utf-8")
    card = folder / "README.md"
    card.write_text("\n".join((intro, _making(found), _scores(found, folder.name), LIMITS)), encoding="utf-8")
    return card


def _making(found: dict[str, Any]) -> str:
    run = found["curve"]
    return MAKING.format(
        **{name: found[name] for name in ("questions", "passages", "seed", "command", "device", "torch")},
        steps=run["steps"],
        rate=found["plan"]["rate"],
        seconds=run["seconds"],
        cut=" The time limit cut the run short." if run["cut_short"] else "",
    )


def _scores(found: dict[str, Any], name: str) -> str:
    scores = [SearchScore(**one) for one in found["scores"]]
    if name == EMBED:
        scores = [one for one in scores if not one.name.startswith(RERANK)]
    return SCORES.format(how=found["scored"], candidates=CANDIDATES, table=table(scores))
