"""BERT in plain torch, with the names of transformers' weights: an embedder and a reranker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 5120
    hidden_size: int = 128
    num_hidden_layers: int = 1
    num_attention_heads: int = 2
    intermediate_size: int = 256
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12


@dataclass(frozen=True)
class Rows:
    """Token ids of several texts, filled up to one length."""

    ids: Tensor
    types: Tensor
    mask: Tensor

    @classmethod
    def of(
        cls, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None, device: str = "cpu"
    ) -> Rows:
        width = max(map(len, ids))
        filled = torch.zeros(len(ids), width, dtype=torch.long)
        kinds, mask = torch.zeros_like(filled), torch.zeros(len(ids), width, dtype=torch.bool)
        for row, one in enumerate(ids):
            filled[row, : len(one)] = torch.tensor(one)
            mask[row, : len(one)] = True
            if types is not None:
                kinds[row, : len(one)] = torch.tensor(types[row])
        return cls(filled.to(device), kinds.to(device), mask.to(device))


class Embeddings(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.position_embeddings = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.token_type_embeddings = nn.Embedding(shape.type_vocab_size, shape.hidden_size)
        self.LayerNorm = nn.LayerNorm(shape.hidden_size, shape.layer_norm_eps)

    def forward(self, rows: Rows) -> Tensor:
        places = torch.arange(rows.ids.shape[1], device=rows.ids.device)
        found = (
            self.word_embeddings(rows.ids)
            + self.token_type_embeddings(rows.types)
            + self.position_embeddings(places)
        )
        return self.LayerNorm(found)


class SelfAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.key = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.value = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        return found.transpose(1, 2).flatten(2)


class Added(nn.Module):
    """A linear layer whose output is added to what was there, and normalised."""

    def __init__(self, width: int, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, shape.hidden_size)
        self.LayerNorm = nn.LayerNorm(shape.hidden_size, shape.layer_norm_eps)
        self.dropout = dropout

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        new: Tensor = self.LayerNorm(F.dropout(self.dense(x), self.dropout, self.training) + before)
        return new


class Attention(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self = SelfAttention(shape)
        self.output = Added(shape.hidden_size, shape, dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.output(self.self(x, mask), x)
        return found


class Dense(nn.Module):
    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, height)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.dense(x)
        return found


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(shape, dropout)
        self.intermediate = Dense(shape.hidden_size, shape.intermediate_size)
        self.output = Added(shape.intermediate_size, shape, dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, mask)
        found: Tensor = self.output(F.relu(self.intermediate(x)), x)
        return found


class Encoder(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))


class Bert(nn.Module):
    """Gives a vector per token; `embed` one per text: their mean, of length 1."""

    def __init__(self, shape: Shape, dropout: float = 0.1) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = Embeddings(shape)
        self.encoder = Encoder(shape, dropout)
        self.dropout = dropout
        self.apply(_begin)

    def forward(self, rows: Rows) -> Tensor:
        x = F.dropout(self.embeddings(rows), self.dropout, self.training)
        for layer in self.encoder.layer:
            x = layer(x, rows.mask)
        return x

    def mean(self, rows: Rows) -> Tensor:
        x = self(rows) * rows.mask[:, :, None]
        return x.sum(1) / rows.mask.sum(1, keepdim=True)

    def embed(self, rows: Rows) -> Tensor:
        return F.normalize(self.mean(rows), dim=-1)


class Reranker(nn.Module):
    """Gives one number per pair of question and passage; servers show its sigmoid."""

    def __init__(self, shape: Shape, dropout: float = 0.1) -> None:
        super().__init__()
        self.shape = shape
        self.bert = Bert(shape, dropout)
        self.bert.pooler = Dense(shape.hidden_size, shape.hidden_size)
        self.classifier = nn.Linear(shape.hidden_size, 1)
        self.apply(_begin)

    def forward(self, rows: Rows) -> Tensor:
        return self.judged(self.bert(rows)[:, 0])

    def judged(self, first: Tensor) -> Tensor:
        """Return the number that the vector of the first place means."""
        pooled = torch.tanh(self.bert.pooler(first))
        found: Tensor = self.classifier(F.dropout(pooled, self.bert.dropout, self.training))
        return found[..., 0]


def _begin(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())
