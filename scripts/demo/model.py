"""Qwen3 in plain torch: the same mathematics and the same names of weights as transformers and vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The size of a model; names as in `config.json`."""

    vocab_size: int = 2048
    hidden_size: int = 320
    intermediate_size: int = 896
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6


SMALL = Shape(hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=4, head_dim=32)
"""For trials on a CPU."""
TINY = replace(SMALL, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=2)
"""For tests."""


@dataclass
class Cache:
    """Keys and values of one layer, one slot per position."""

    keys: Tensor
    values: Tensor

    def put(self, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[rows, :, positions] = keys.transpose(1, 2)
        self.values[rows, :, positions] = values.transpose(1, 2)
        return self.keys, self.values


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, turned: tuple[Tensor, Tensor], positions: Tensor | None, cache: Cache | None
    ) -> Tensor:
        heads = (*x.shape[:2], -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), turned)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), turned)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        seen = None
        if cache is not None and positions is not None:
            k, v = cache.put(positions, k, v)
            seen = torch.arange(k.shape[2], device=x.device) <= positions[:, None, :, None]
        # Under autocast the norms leave q and k wide; in the type of v they get the fast kernel.
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, seen, is_causal=seen is None)
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, turned: tuple[Tensor, Tensor], positions: Tensor | None, cache: Cache | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turned, positions, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Qwen3(nn.Module):
    """Embeddings are also the output head, as `tie_word_embeddings` says."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.apply(_spread)
        for layer in self.model.layers:
            for into_stream in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(into_stream.weight, std=0.02 / (2 * shape.num_hidden_layers) ** 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """What each position says of the next one, before the head; rows begin at position 0."""
        return self.from_embedded(self.model.embed_tokens(ids))

    def from_embedded(self, x: Tensor) -> Tensor:
        """The same, of rows that are embedded already."""
        return self._through(x, torch.arange(x.shape[1], device=x.device)[None], None)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def _through(self, x: Tensor, positions: Tensor, caches: Sequence[Cache] | None) -> Tensor:
        turned = angles(positions, self.shape)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, turned, positions if caches else None, caches[index] if caches else None)
        return self.model.norm(x)

    @torch.no_grad()
    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        end: int,
        max_tokens: int,
        embed: Callable[[Tensor], Tensor] | None = None,
    ) -> list[list[int]]:
        """The likeliest continuation of each prompt, without its end token; all in one batch.

        `embed` is for prompts in which not every id is a word.
        """
        weight = self.model.embed_tokens.weight
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=weight.device)
        longest = int(lengths.max())
        caches = self._caches(len(prompts), longest + max_tokens, weight)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=weight.device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        # What stands behind a short prompt is overwritten before a later position sees it.
        positions = torch.arange(longest, device=weight.device).expand(len(prompts), -1)
        hidden = self._through((embed or self.model.embed_tokens)(ids), positions, caches)
        last = hidden[torch.arange(len(prompts), device=weight.device), lengths - 1]
        found: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        for step in range(max_tokens):
            token = self.logits(last).argmax(-1)
            for row, value in enumerate(token.tolist()):
                if row in going and value == end:
                    going.discard(row)
                elif row in going:
                    found[row].append(value)
            if not going:
                break
            x = self.model.embed_tokens(token[:, None])
            last = self._through(x, (lengths + step)[:, None], caches)[:, 0]
        return found

    def _caches(self, rows: int, slots: int, like: Tensor) -> list[Cache]:
        size = (rows, self.shape.num_key_value_heads, slots, self.shape.head_dim)
        return [Cache(like.new_zeros(size), like.new_zeros(size)) for _ in self.model.layers]


def angles(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, for both halves of a head."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float, device=positions.device) / shape.head_dim
    turn = positions[..., None].float() / shape.rope_theta**steps
    turn = torch.cat((turn, turn), -1)[:, None]
    return turn.cos(), turn.sin()


def rotate(x: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in turned)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _spread(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
