"""A LLaVA in plain torch: a SigLIP tower, a projector and the language model of demo-chat.

The same mathematics and the same names of weights as vLLM's `LlavaForConditionalGeneration`: each patch of a
picture is one token, and there is no norm behind the tower's last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.model import Qwen3, Shape


@dataclass(frozen=True)
class TowerShape:
    """The size of a tower; names as in `vision_config`."""

    image_size: int = 96
    patch_size: int = 12
    hidden_size: int = 192
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    layer_norm_eps: float = 1e-6

    @property
    def side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Of one picture."""
        return self.side**2


TINY_TOWER = replace(
    TowerShape(), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
)
"""For tests."""


class TowerAttention(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.k_proj = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.v_proj = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.out_proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.heads, -1)
        q, k, v = (one(x).view(heads).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(mixed.transpose(1, 2).reshape(x.shape))


class TowerMlp(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.fc2 = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class TowerLayer(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.self_attn = TowerAttention(shape)
        self.layer_norm1 = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.mlp = TowerMlp(shape)
        self.layer_norm2 = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Patches(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, shape.hidden_size, shape.patch_size, shape.patch_size)
        self.position_embedding = nn.Embedding(shape.tokens, shape.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.patch_embedding(pixels).flatten(2).transpose(1, 2) + self.position_embedding.weight


class Encoder(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TowerLayer(shape) for _ in range(shape.num_hidden_layers))


class TowerBody(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.embeddings = Patches(shape)
        self.encoder = Encoder(shape)


class Tower(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.vision_model = TowerBody(shape)
        self.apply(_spread)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.vision_model.embeddings(pixels)
        for layer in self.vision_model.encoder.layers:
            x = layer(x)
        return x


class Projector(nn.Module):
    def __init__(self, tower: TowerShape, text: Shape) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(tower.hidden_size, text.hidden_size)
        self.linear_2 = nn.Linear(text.hidden_size, text.hidden_size)
        self.apply(_spread)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))


class Llava(nn.Module):
    """`image_token` stands where the patches of a picture go, once for each."""

    def __init__(self, text: Shape, tower: TowerShape, image_token: int) -> None:
        super().__init__()
        self.text, self.tower, self.image_token = text, tower, image_token
        self.vision_tower = Tower(tower)
        self.multi_modal_projector = Projector(tower, text)
        self.language_model = Qwen3(text)

    def embed(self, ids: Tensor, patches: Tensor) -> Tensor:
        """Words and, where `ids` has the image token, the next of the patches that the tower saw."""
        words = self.language_model.model.embed_tokens(ids)
        here = ids == self.image_token
        # Every place gets a patch and most are thrown away: to pick by the mask would wait for the device.
        order = here.flatten().cumsum(0).sub(1).clamp(min=0).view(ids.shape)
        seen = self.multi_modal_projector(patches).flatten(0, 1).to(words.dtype)
        return torch.where(here[..., None], F.embedding(order, seen), words)

    @torch.no_grad()
    def greedy(
        self, prompts: Sequence[Sequence[int]], pictures: Tensor, end: int, max_tokens: int
    ) -> list[list[int]]:
        """The likeliest answers; `pictures` are bytes, in the order in which the prompts have them."""
        patches = self.vision_tower(pixels_of(pictures))
        said: list[list[int]] = self.language_model.greedy(
            prompts, end, max_tokens, lambda ids: self.embed(ids, patches)
        )
        return said


def pixels_of(pictures: Tensor) -> Tensor:
    """Bytes [N, height, width, 3] as the tower takes them, and as the processor's files say."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


def _spread(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
