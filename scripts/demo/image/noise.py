"""Noise by the step, and DDIM: what diffusers' DDIMScheduler does with the settings below."""

from __future__ import annotations

import math
from typing import Any

import torch

TIMES = 1000
SETTINGS: dict[str, Any] = {
    "num_train_timesteps": TIMES,
    "beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "v_prediction",
    # The first step starts from nothing but noise, so that a picture can be all black or all white.
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "set_alpha_to_one": True,
    "clip_sample": False,
    "steps_offset": 1,  # not used by this spacing; another value makes diffusers warn
}


def kept_share() -> torch.Tensor:
    """How much of the picture's variance is left at each time ("alphas_cumprod"); none at the last."""

    def bar(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - bar((n + 1) / TIMES) / bar(n / TIMES), 0.999) for n in range(TIMES)]
    root = torch.cumprod(1 - torch.tensor(betas, dtype=torch.float32), 0).sqrt()
    first, last = root[0].clone(), root[-1].clone()
    return ((root - last) * first / (first - last)) ** 2


def with_noise(
    latents: torch.Tensor, noise: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents at a time, and the velocity that the network is to say."""
    keep, lose = share.sqrt().view(-1, 1, 1, 1), (1 - share).sqrt().view(-1, 1, 1, 1)
    return keep * latents + lose * noise, keep * noise - lose * latents


def times(steps: int) -> list[int]:
    """From noise to picture."""
    return [round(TIMES - index * TIMES / steps) - 1 for index in range(steps)]


def step_back(
    latents: torch.Tensor, velocity: torch.Tensor, time: int, steps: int, shares: torch.Tensor
) -> torch.Tensor:
    """One step of DDIM without new noise."""
    before = time - TIMES // steps
    share = shares[time]
    share_before = shares[before] if before >= 0 else torch.ones((), device=shares.device)
    picture = share.sqrt() * latents - (1 - share).sqrt() * velocity
    noise = share.sqrt() * velocity + (1 - share).sqrt() * latents
    return share_before.sqrt() * picture + (1 - share_before).sqrt() * noise
