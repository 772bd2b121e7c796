"""Trains the reranker, which begins as the embedder and learns to tell apart the pages that it confuses.

One head gathers the question, the other one the passage, and the layer behind them compares the two. There
is one layer, and its first place always asks the same: so what a head gathers is a weighted mean over tokens,
and training needs only bags of them, as in words.py. The sums are those that a server computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo.search.bert import Bert, Reranker
from demo.search.pairs import Source
from demo.search.passages import Passage
from demo.search.tokens import FIRST, SPECIAL
from demo.search.words import bags, silence, thinned, token_vectors
from demo.train import Curve, Plan, follow

WRONG = 9
"""Wrong passages beside the right one in a list: the best of pages that the embedder takes for right."""
AMONG = 16
"""Pages that they are chosen from."""
TAUGHT = 20.0
"""How sharply the embedder says what is likely; without it the reranker learns questions by heart."""
RIGHT = 0.5
"""How much the right page counts beside that, where a person wrote the question."""
SIDE = 4.0
"""How far apart the two sides of a pair are, in the spread of the embeddings."""
SHARPNESS = 10.0
FIRST_ID = SPECIAL.index(FIRST)


@torch.no_grad()
def begin(model: Reranker, embedder: Bert) -> None:
    """Set the weights so that the likeness of the embedder's vectors comes out; it has half the width."""
    bert, half = model.bert, embedder.shape.hidden_size
    width, side = 2 * half, 2 * half - 1
    silence(bert)
    wanted = token_vectors(embedder)
    wanted = wanted - wanted.mean(0)
    words = bert.embeddings
    before = embedder.embeddings.word_embeddings.weight
    words.word_embeddings.weight.copy_(torch.cat((wanted / wanted.std(), before / before.std()), 1))
    words.word_embeddings.weight[:, side] = 0
    words.token_type_embeddings.weight.zero_()
    words.token_type_embeddings.weight[:, side] = torch.tensor([-SIDE, SIDE])
    layer = bert.encoder.layer[0]
    attention = layer.attention.self
    for kind, first in ((0, 0), (1, half)):
        seen = words.LayerNorm(words.word_embeddings.weight + words.token_type_embeddings.weight[kind])
        seen = torch.cat((seen, torch.ones_like(seen[:, :1])), 1)
        fitted = torch.linalg.lstsq(seen, wanted / wanted.std()).solution.T
        attention.value.weight[first : first + half] = fitted[:, :-1]
        attention.value.bias[first : first + half] = fitted[:, -1]
        attention.key.weight[first, side] = 2 * kind - 1
        attention.query.bias[first] = SHARPNESS * (half / 64) ** 0.5
    layer.attention.output.dense.weight.copy_(torch.eye(width))
    layer.attention.output.dense.bias.copy_(-_first(model)[0])
    same, other = (torch.cat((torch.eye(half), sign * torch.eye(half)), 1) for sign in (1, -1))
    # |a + b| - |a - b| is large where both have the same sign; it comes out at the first place.
    layer.intermediate.dense.weight[: 4 * half] = torch.cat((same, -same, other, -other))
    layer.output.dense.weight[0, : 2 * half] = 0.1
    layer.output.dense.weight[0, 2 * half : 4 * half] = -0.1
    bert.pooler.dense.weight[0, 0] = 0.3
    model.classifier.weight.mul_(0.1)
    model.classifier.weight[0, 0] = 6


@dataclass(frozen=True)
class Gathered:
    """What the heads gather from one side of pairs: sums of values and of weights."""

    values: Tensor
    weights: Tensor


def _first(model: Reranker) -> Tensor:
    """Return the input of the first place, which is the same for every pair."""
    words = model.bert.embeddings
    found: Tensor = words.LayerNorm(
        words.word_embeddings.weight[FIRST_ID : FIRST_ID + 1]
        + words.token_type_embeddings.weight[0]
        + words.position_embeddings.weight[0]
    )
    return found


def gather(model: Reranker, bag: Tensor, kind: int) -> Gathered:
    """Gather one side, 0 for questions and 1 for passages, from bags of tokens."""
    words, attention = model.bert.embeddings, model.bert.encoder.layer[0].attention.self
    heads = attention.heads
    seen = words.LayerNorm(words.word_embeddings.weight + words.token_type_embeddings.weight[kind])
    asked = attention.query(_first(model)).unflatten(-1, (heads, -1))[0]
    # What is asked is the same for all, so it goes through the keys' matrix once, and not every token.
    keys = attention.key.weight.unflatten(0, (heads, -1))
    wanted = torch.einsum("hd,hdw->wh", asked, keys) / asked.shape[-1] ** 0.5
    weights = (seen @ wanted).clamp(-30, 30).exp()
    total = torch.sparse.mm(bag, weights)
    sums = [torch.sparse.mm(bag, weights[:, head, None] * seen) for head in range(heads)]
    values = attention.value.weight.unflatten(0, (heads, -1))
    biases = attention.value.bias.unflatten(0, (heads, -1))
    return Gathered(
        torch.stack([sums[h] @ values[h].T + total[:, h, None] * biases[h] for h in range(heads)], 1), total
    )


def numbers(model: Reranker, asked: Gathered, shown: Gathered, lists: Tensor) -> Tensor:
    """Return for each question a number for each passage of its list, before the sigmoid."""
    values = asked.values[:, None] + shown.values[lists]
    weights = asked.weights[:, None] + shown.weights[lists]
    gathered = F.dropout((values / weights[..., None]).flatten(2), model.bert.dropout, model.training)
    layer, first = model.bert.encoder.layer[0], _first(model)
    x = layer.attention.output(gathered, first)
    return model.judged(layer.output(F.relu(layer.intermediate(x)), x))


def train_reranker(
    model: Reranker,
    embedder: Bert,
    tokenizer: Tokenizer,
    passages: Sequence[Passage],
    source: Source,
    plan: Plan,
    asked: int = 40,
    made: int = 40,
    thin: float = 0.1,
) -> Curve:
    """Train on lists: the right page's passage among those of pages that the embedder finds."""
    torch.manual_seed(plan.seed)
    device = model.classifier.weight.device.type
    size = model.shape.vocab_size
    ids = [one.ids[1:] for one in tokenizer.encode_batch([p.whole for p in passages])]
    shown = bags(ids, size, device)
    with torch.no_grad():
        table = token_vectors(embedder)
        places = F.normalize(torch.sparse.mm(bags([[FIRST_ID, *one] for one in ids], size, device), table))
    names = sorted({one.page for one in passages})
    page_of = torch.tensor([names.index(one.page) for one in passages], device=device)
    # What words mean stays as it is: others would be learnt by heart.
    model.bert.embeddings.requires_grad_(False)
    model.train()

    def learn() -> Tensor:
        pairs = [source.asked() for _ in range(asked)] + [source.made() for _ in range(made)]
        texts = tokenizer.encode_batch([pair.text for pair in pairs])
        questions = bags([one.ids for one in texts], size, device)
        with torch.no_grad():
            likeness = F.normalize(torch.sparse.mm(questions, table)) @ places.T
            is_page = torch.zeros(len(pairs), len(names), dtype=torch.bool, device=device)
            for row, pair in enumerate(pairs):
                is_page[row, [names.index(page) for page in pair.pages]] = True
            lists = _lists(likeness, is_page, page_of)
            for row, pair in enumerate(pairs):
                if pair.passage is not None:
                    lists[row, 0] = pair.passage
            taught = (TAUGHT * likeness.gather(1, lists)).softmax(1)
        found = numbers(model, gather(model, questions, 0), gather(model, thinned(shown, thin), 1), lists)
        right = torch.zeros(asked, dtype=torch.long, device=device)
        loss = F.cross_entropy(found, taught) + RIGHT * F.cross_entropy(found[:asked], right)
        loss.backward()
        return loss.detach()[None]

    return follow(plan, model.parameters(), device, learn)


def _lists(likeness: Tensor, is_page: Tensor, page_of: Tensor) -> Tensor:
    """Return for each question a right passage, then wrong ones of different pages, some of the best."""
    # A little noise, so that not always the same passage stands for a page.
    noisy = likeness + 0.05 * torch.randn_like(likeness)
    of_page = is_page[:, page_of]
    right = noisy.masked_fill(~of_page, -torch.inf).argmax(1)
    best, at = [], []
    for page in range(is_page.shape[1]):
        of_this = noisy.masked_fill(page_of != page, -torch.inf).max(1)
        best.append(of_this.values)
        at.append(of_this.indices)
    pages, places = torch.stack(best, 1).masked_fill(is_page, -torch.inf), torch.stack(at, 1)
    nearest = pages.topk(AMONG, 1).indices
    chosen = nearest.gather(1, torch.rand_like(nearest, dtype=torch.float).argsort(1)[:, :WRONG])
    return torch.cat((right[:, None], places.gather(1, chosen)), 1)
