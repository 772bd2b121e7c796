"""The parts of demo-image together: prompts to pictures, as diffusers' StableDiffusionPipeline does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import nn

from demo.image import noise
from demo.image.autoencoder import Autoencoder, AutoencoderShape
from demo.image.render import as_bytes
from demo.image.text import ClipText, TextShape, ids_of
from demo.image.unet import Unet, UnetShape

STEPS, GUIDANCE = 50, 7.5
"""What the pipeline does unless it is told otherwise."""


@dataclass(frozen=True)
class Shapes:
    text: TextShape = TextShape()
    unet: UnetShape = UnetShape()
    autoencoder: AutoencoderShape = AutoencoderShape()


TINY = Shapes(
    TextShape(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2),
    UnetShape(8, block_out_channels=(16, 32), heads=2, cross_attention_dim=32, norm_num_groups=8),
    AutoencoderShape((8, 8, 8), (8, 8, 8), (1, 1, 1), (1, 1, 1)),
)
"""For tests: pictures of half the side."""


@dataclass
class Pipeline:
    tokenizer: Tokenizer
    shapes: Shapes
    text: ClipText = field(init=False)
    unet: Unet = field(init=False)
    autoencoder: Autoencoder = field(init=False)

    def __post_init__(self) -> None:
        self.text = ClipText(self.shapes.text)
        self.unet = Unet(self.shapes.unet)
        self.autoencoder = Autoencoder(self.shapes.autoencoder)

    @property
    def parts(self) -> dict[str, nn.Module]:
        """By the names of their folders."""
        return {"text_encoder": self.text, "unet": self.unet, "vae": self.autoencoder}

    @property
    def device(self) -> torch.device:
        found: torch.device = self.unet.conv_in.weight.device
        return found

    @property
    def side(self) -> int:
        return self.shapes.unet.sample_size * self.shapes.autoencoder.scale

    def to(self, device: str) -> Pipeline:
        for part in self.parts.values():
            part.to(device)
        return self

    def parameters(self) -> int:
        return sum(weight.numel() for part in self.parts.values() for weight in part.parameters())

    @torch.no_grad()
    def draw(
        self, prompts: Sequence[str], seed: int = 1, steps: int = STEPS, guidance: float = GUIDANCE
    ) -> NDArray[np.uint8]:
        """Pictures [n, height, width, 3]."""
        device, side = self.device, self.shapes.unet.sample_size
        prompt = self.text(ids_of(self.tokenizer, prompts).to(device))
        dice = torch.Generator().manual_seed(seed)
        latents = torch.randn((len(prompts), self.shapes.unet.in_channels, side, side), generator=dice)
        latents, shares = latents.to(device), noise.kept_share().to(device)
        scale = torch.full((len(prompts),), guidance, device=device)
        for time in noise.times(steps):
            velocity = self.unet(latents, torch.full_like(scale, time), scale, prompt)
            latents = noise.step_back(latents, velocity, time, steps, shares)
        return as_bytes(self.autoencoder.decode(latents))
