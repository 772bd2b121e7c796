"""Trains what words mean, as if a text were a bag of them: a hundred times cheaper than with attention.

While the layers of a Bert add nothing, a text's vector is the mean of vectors that depend on single tokens.
Then all passages fit into every step, as a sparse matrix, and each question is compared with all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo.search.bert import Bert
from demo.search.pairs import Source
from demo.search.passages import Passage
from demo.train import Curve, Plan, follow

DIMENSIONS = (32, 64)
"""The vectors work when cut to so many numbers, too."""
SCALE = 12.0
"""Of likeness, which is between -1 and 1."""


def silence(model: Bert) -> None:
    """Let positions and layers add nothing until they learn to."""
    nn.init.zeros_(model.embeddings.position_embeddings.weight)
    for layer in model.encoder.layer:
        nn.init.zeros_(layer.attention.output.dense.weight)
        nn.init.zeros_(layer.output.dense.weight)


def token_vectors(model: Bert) -> Tensor:
    """Return what a silent model makes of every token."""
    parts = model.embeddings
    found: Tensor = parts.LayerNorm(parts.word_embeddings.weight + parts.token_type_embeddings.weight[0])
    for layer in model.encoder.layer:
        found = layer.output.LayerNorm(layer.attention.output.LayerNorm(found))
    return found


def bags(ids: Sequence[Sequence[int]], size: int, device: str) -> Tensor:
    """Return how often each row has each token, as a sparse matrix."""
    rows, columns, values = [], [], []
    for row, one in enumerate(ids):
        for token, count in Counter(one).items():
            rows.append(row)
            columns.append(token)
            values.append(float(count))
    return torch.sparse_coo_tensor(
        torch.tensor([rows, columns]),
        torch.tensor(values),
        (len(ids), size),
        device=device,
        check_invariants=False,
    ).coalesce()


def thinned(bag: Tensor, share: float) -> Tensor:
    """Return the bag without a share of its entries."""
    values = F.dropout(bag.values(), share)
    return torch.sparse_coo_tensor(
        bag.indices(), values, bag.shape, is_coalesced=True, check_invariants=False
    )


def train_words(
    model: Bert,
    tokenizer: Tokenizer,
    passages: Sequence[Passage],
    source: Source,
    plan: Plan,
    asked: int = 128,
    made: int = 64,
    thin: float = 0.5,
) -> Curve:
    """Train embeddings and norms; `asked` and `made` questions in each step."""
    torch.manual_seed(plan.seed)
    device = model.embeddings.LayerNorm.weight.device.type
    size = model.shape.vocab_size
    silence(model)
    shown = bags([one.ids for one in tokenizer.encode_batch([p.whole for p in passages])], size, device)
    names = sorted({one.page for one in passages})
    page_of = torch.tensor([names.index(one.page) for one in passages], device=device)

    def learn() -> Tensor:
        pairs = [source.asked() for _ in range(asked)] + [source.made() for _ in range(made)]
        texts = tokenizer.encode_batch([pair.text for pair in pairs])
        table = F.dropout(token_vectors(model), model.dropout)
        questions = torch.sparse.mm(bags([one.ids for one in texts], size, device), table)
        places = torch.sparse.mm(thinned(shown, thin), table)
        is_page = torch.zeros(len(pairs), len(names), dtype=torch.bool)
        for row, pair in enumerate(pairs):
            for page in pair.pages:
                is_page[row, names.index(page)] = True
        of_page = is_page.to(device)[:, page_of]
        right = of_page.clone()
        for row, pair in enumerate(pairs):
            if pair.passage is not None:
                right[row] = False
                right[row, pair.passage] = True
        loss = torch.stack(
            [
                contrast(questions[:, :width], places[:, :width], right, of_page & ~right)
                for width in (model.shape.hidden_size, *DIMENSIONS)
            ]
        ).mean()
        loss.backward()
        return loss.detach()[None]

    return follow(plan, model.parameters(), device, learn)


def contrast(asked: Tensor, shown: Tensor, right: Tensor, ignored: Tensor) -> Tensor:
    """Return the loss of taking others for what is right."""
    logits = SCALE * F.normalize(asked.float(), dim=-1) @ F.normalize(shown.float(), dim=-1).T
    logits = logits.masked_fill(ignored, -torch.inf)
    return (logits.logsumexp(-1) - logits.masked_fill(~right, -torch.inf).logsumexp(-1)).mean()
