"""diffusers' AutoencoderTiny in plain torch, with the names of its files: pictures to latents and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class AutoencoderShape:
    """Each stage after the first halves the side: three make 64 pixels 16."""

    encoder_block_out_channels: tuple[int, ...] = (32, 32, 32)
    decoder_block_out_channels: tuple[int, ...] = (48, 48, 48)
    num_encoder_blocks: tuple[int, ...] = (1, 1, 1)
    num_decoder_blocks: tuple[int, ...] = (2, 2, 1)
    latent_channels: int = 4

    @property
    def scale(self) -> int:
        halvings = len(self.decoder_block_out_channels) - 1
        return 1 << halvings


class Autoencoder(nn.Module):
    def __init__(self, shape: AutoencoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.encoder, self.decoder = _Encoder(shape), _Decoder(shape)

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        latents: torch.Tensor = self.encoder(pictures)
        return latents

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        pictures: torch.Tensor = self.decoder(latents)
        return pictures


class _Encoder(nn.Module):
    def __init__(self, shape: AutoencoderShape) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for stage, wide in enumerate(shape.encoder_block_out_channels):
            first = nn.Conv2d(3, wide, 3, padding=1)
            layers.append(first if stage == 0 else nn.Conv2d(wide, wide, 3, 2, 1, bias=False))
            layers += [_Block(wide) for _ in range(shape.num_encoder_blocks[stage])]
        layers.append(nn.Conv2d(shape.encoder_block_out_channels[-1], shape.latent_channels, 3, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latents: torch.Tensor = self.layers((x + 1) / 2)
        return latents


class _Decoder(nn.Module):
    def __init__(self, shape: AutoencoderShape) -> None:
        super().__init__()
        widths = shape.decoder_block_out_channels
        layers: list[nn.Module] = [nn.Conv2d(shape.latent_channels, widths[0], 3, padding=1), nn.ReLU()]
        for stage, wide in enumerate(widths):
            layers += [_Block(wide) for _ in range(shape.num_decoder_blocks[stage])]
            if stage < len(widths) - 1:
                layers += [nn.Upsample(scale_factor=2), nn.Conv2d(wide, wide, 3, padding=1, bias=False)]
            else:
                layers.append(nn.Conv2d(wide, 3, 3, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pictures: torch.Tensor = self.layers(torch.tanh(x / 3) * 3) * 2 - 1
        return pictures


class _Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(wide, wide, 3, padding=1) for _ in range(3)]
        self.conv = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU(), convolutions[2])
        nn.init.zeros_(
            convolutions[2].weight
        )  # does nothing at first: there are no norms to keep it in bounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x) + x)
