"""diffusers' UNet2DConditionModel of two levels in plain torch, with the names of its files.

The outer level has convolutions only; the inner one and the middle also look at the prompt. The guidance
scale is an input like the time (`time_cond_proj_dim`), so a picture takes one pass per step and not two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

EPSILON = 1e-5


@dataclass(frozen=True)
class UnetShape:
    sample_size: int = 16
    in_channels: int = 4
    block_out_channels: tuple[int, int] = (64, 96)
    layers_per_block: int = 1
    heads: int = 4
    cross_attention_dim: int = 128
    norm_num_groups: int = 16
    time_cond_proj_dim: int = 64


class Unet(nn.Module):
    """Latents, times and guidance scales [n], prompt [n, tokens, wide] -> the velocity of the latents."""

    def __init__(self, shape: UnetShape) -> None:
        super().__init__()
        self.shape = shape
        outer, inner = shape.block_out_channels
        self.conv_in = nn.Conv2d(shape.in_channels, outer, 3, padding=1)
        self.time_embedding = nn.ModuleDict(
            {
                "cond_proj": nn.Linear(shape.time_cond_proj_dim, outer, bias=False),
                "linear_1": nn.Linear(outer, 4 * outer),
                "linear_2": nn.Linear(4 * outer, 4 * outer),
            }
        )
        self.down_blocks = nn.ModuleList(
            (
                _Down(shape, outer, outer, looks=False, halves=True),
                _Down(shape, outer, inner, looks=True, halves=False),
            )
        )
        self.mid_block = _Middle(shape, inner)
        self.up_blocks = nn.ModuleList(
            (
                _Up(shape, inner, inner, outer, looks=True, doubles=True),
                _Up(shape, inner, outer, outer, looks=False, doubles=False),
            )
        )
        self.conv_norm_out = nn.GroupNorm(shape.norm_num_groups, outer, EPSILON)
        self.conv_out = nn.Conv2d(outer, shape.in_channels, 3, padding=1)
        # Every branch does nothing at first.
        for part in self.modules():
            if isinstance(part, (_Resnet, _Look)):
                nn.init.zeros_((part.conv2 if isinstance(part, _Resnet) else part.proj_out).weight)

    def forward(
        self, x: torch.Tensor, times: torch.Tensor, guidance: torch.Tensor, prompt: torch.Tensor
    ) -> torch.Tensor:
        time = self._time(times, guidance, self.conv_in.weight.dtype)
        x = self.conv_in(x)
        kept = [x]
        for down in self.down_blocks:
            x, more = down(x, time, prompt)
            kept += more
        x = self.mid_block(x, time, prompt)
        for up in self.up_blocks:
            x = up(x, time, prompt, kept)
        out: torch.Tensor = self.conv_out(F.silu(self.conv_norm_out(x)))
        return out

    def _time(self, times: torch.Tensor, guidance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        waves = _cosine_first(times, self.shape.block_out_channels[0]).to(dtype)
        scale = _sine_first((guidance - 1) * 1000, self.shape.time_cond_proj_dim).to(dtype)
        waves = waves + self.time_embedding["cond_proj"](scale)
        out: torch.Tensor = self.time_embedding["linear_2"](F.silu(self.time_embedding["linear_1"](waves)))
        return out


def _cosine_first(values: torch.Tensor, wide: int) -> torch.Tensor:
    """As diffusers writes times, with flip_sin_to_cos and freq_shift 0."""
    angles = _angles(values, wide // 2, wide // 2)
    return torch.cat((angles.cos(), angles.sin()), -1)


def _sine_first(values: torch.Tensor, wide: int) -> torch.Tensor:
    """As Stable Diffusion's pipeline writes the guidance scale."""
    angles = _angles(values, wide // 2, wide // 2 - 1)
    return torch.cat((angles.sin(), angles.cos()), -1)


def _angles(values: torch.Tensor, count: int, divisor: int) -> torch.Tensor:
    powers = torch.arange(count, dtype=torch.float32, device=values.device) / divisor
    return values.float()[:, None] * torch.exp(-math.log(10000.0) * powers)


class _Down(nn.Module):
    def __init__(self, shape: UnetShape, wide: int, out: int, *, looks: bool, halves: bool) -> None:
        super().__init__()
        layers = shape.layers_per_block
        self.resnets = nn.ModuleList(_Resnet(shape, wide if n == 0 else out, out) for n in range(layers))
        self.attentions = nn.ModuleList(_Look(shape, out) for _ in range(layers if looks else 0))
        # Each with a key of its own in the files: downsamplers.0.conv
        shrink = nn.ModuleDict({"conv": nn.Conv2d(out, out, 3, 2, 1)}) if halves else None
        self.downsamplers = nn.ModuleList([shrink] if shrink is not None else [])

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        kept = []
        for index, resnet in enumerate(self.resnets):
            x = resnet(x, time)
            if len(self.attentions):
                x = self.attentions[index](x, prompt)
            kept.append(x)
        for shrink in self.downsamplers:
            x = shrink["conv"](x)
            kept.append(x)
        return x, kept


class _Middle(nn.Module):
    def __init__(self, shape: UnetShape, wide: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_Resnet(shape, wide, wide) for _ in range(2))
        self.attentions = nn.ModuleList([_Look(shape, wide)])

    def forward(self, x: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        x = self.attentions[0](self.resnets[0](x, time), prompt)
        out: torch.Tensor = self.resnets[1](x, time)
        return out


class _Up(nn.Module):
    def __init__(
        self, shape: UnetShape, before: int, out: int, last_kept: int, *, looks: bool, doubles: bool
    ) -> None:
        super().__init__()
        layers = shape.layers_per_block + 1
        self.resnets = nn.ModuleList(
            _Resnet(shape, (before if n == 0 else out) + (last_kept if n == layers - 1 else out), out)
            for n in range(layers)
        )
        self.attentions = nn.ModuleList(_Look(shape, out) for _ in range(layers if looks else 0))
        grow = nn.ModuleDict({"conv": nn.Conv2d(out, out, 3, padding=1)}) if doubles else None
        self.upsamplers = nn.ModuleList([grow] if grow is not None else [])

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor, kept: list[torch.Tensor]
    ) -> torch.Tensor:
        for index, resnet in enumerate(self.resnets):
            x = resnet(torch.cat((x, kept.pop()), 1), time)
            if len(self.attentions):
                x = self.attentions[index](x, prompt)
        for grow in self.upsamplers:
            x = grow["conv"](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return x


class _Resnet(nn.Module):
    def __init__(self, shape: UnetShape, wide: int, out: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(shape.norm_num_groups, wide, EPSILON)
        self.conv1 = nn.Conv2d(wide, out, 3, padding=1)
        self.time_emb_proj = nn.Linear(4 * shape.block_out_channels[0], out)
        self.norm2 = nn.GroupNorm(shape.norm_num_groups, out, EPSILON)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        if wide != out:
            self.conv_shortcut = nn.Conv2d(wide, out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        seen = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(F.silu(time))[:, :, None, None]
        seen = self.conv2(F.silu(self.norm2(seen)))
        past = self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x
        out: torch.Tensor = past + seen
        return out


class _Look(nn.Module):
    """Transformer2DModel of one block: every place looks at every other, then at the prompt."""

    def __init__(self, shape: UnetShape, wide: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(shape.norm_num_groups, wide, 1e-6)
        self.proj_in, self.proj_out = nn.Conv2d(wide, wide, 1), nn.Conv2d(wide, wide, 1)
        self.transformer_blocks = nn.ModuleList([_Block(shape, wide)])

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2:]
        seen = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        for block in self.transformer_blocks:
            seen = block(seen, prompt)
        out: torch.Tensor = x + self.proj_out(seen.transpose(1, 2).unflatten(2, (height, width)))
        return out


class _Block(nn.Module):
    def __init__(self, shape: UnetShape, wide: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(wide) for _ in range(3))
        self.attn1 = _Attention(shape, wide, wide)
        self.attn2 = _Attention(shape, wide, shape.cross_attention_dim)
        gated = nn.ModuleDict({"proj": nn.Linear(wide, 8 * wide)})
        self.ff = nn.ModuleDict({"net": nn.ModuleList((gated, nn.Identity(), nn.Linear(4 * wide, wide)))})

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + self.attn1(normed, normed)
        x = x + self.attn2(self.norm2(x), prompt)
        first, _, last = self.ff["net"]
        hidden, gate = first["proj"](self.norm3(x)).chunk(2, -1)
        out: torch.Tensor = x + last(hidden * F.gelu(gate))
        return out


class _Attention(nn.Module):
    def __init__(self, shape: UnetShape, wide: int, other: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.to_q = nn.Linear(wide, wide, bias=False)
        self.to_k, self.to_v = nn.Linear(other, wide, bias=False), nn.Linear(other, wide, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(wide, wide)])

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            made.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for made in (self.to_q(x), self.to_k(other), self.to_v(other))
        )
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: torch.Tensor = self.to_out[0](seen)
        return out
