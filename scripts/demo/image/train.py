"""Trains demo-image: first the autoencoder, then the network that draws and the text encoder together."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from demo.image import noise
from demo.image.pipeline import Pipeline
from demo.image.render import draw
from demo.train import Curve

WIDEST_GUIDANCE = 20.0
LATENT_NOISE = 0.1
"""What the decoder learns to overlook."""


@dataclass(frozen=True)
class ImagePlan:
    """How to train one of the two."""

    steps: int
    batch: int
    rate: float
    last_rate: float = 0.02
    """Of the rate, at the end."""
    warm_up: int = 100
    decay: float = 0.01
    clip: float = 1.0
    minutes: float = math.inf
    """The rate falls faster when time would run out; a run that met this limit is not exactly repeatable."""
    average: float = 0.999
    """How slowly the weights that are kept follow those that are trained."""
    seed: int = 1
    report_every: int = 100


def looseness(guidance: torch.Tensor) -> torch.Tensor:
    """What guidance means to this model: how freely it draws. All of it at 1, a quarter at 7.5."""
    return 1 / (1 + (guidance - 1).clamp(min=0) / 2)


def train_autoencoder(pipeline: Pipeline, rows: torch.Tensor, plan: ImagePlan) -> Curve:
    """The loss is the mean absolute error; edges are few, so their error counts by itself."""
    device, model = pipeline.device, pipeline.autoencoder

    def loss() -> torch.Tensor:
        chosen = rows[torch.randint(len(rows), (plan.batch,), device=device)]
        pictures = _drawn(pipeline, chosen, torch.ones(plan.batch, device=device))
        latents = model.encode(pictures)
        again = model.decode(latents + LATENT_NOISE * torch.randn_like(latents)).float()
        # Latents of mean 0 and variance 1 in each channel suit the noise that comes next.
        flat = latents.float().transpose(0, 1).flatten(1)
        apart = flat.mean(1).square().mean() + (flat.var(1) - 1).square().mean()
        return F.l1_loss(again, pictures) + F.mse_loss(again, pictures) + 0.01 * apart

    return _run("autoencoder", [model], loss, plan)


def train_diffusion(pipeline: Pipeline, ids: torch.Tensor, rows: torch.Tensor, plan: ImagePlan) -> Curve:
    """Velocity prediction. Prompts are given, their pictures drawn anew each time."""
    device, unet, text = pipeline.device, pipeline.unet, pipeline.text
    shares = noise.kept_share().to(device)
    frozen = pipeline.autoencoder.eval()

    def loss() -> torch.Tensor:
        chosen = torch.randint(len(rows), (plan.batch,), device=device)
        guidance = torch.rand(plan.batch, device=device) * WIDEST_GUIDANCE
        with torch.no_grad():
            pictures = _drawn(pipeline, rows[chosen], looseness(guidance))
            latents = frozen.encode(pictures).float()
        times = torch.randint(noise.TIMES, (plan.batch,), device=device)
        noisy, wanted = noise.with_noise(latents, torch.randn_like(latents), shares[times])
        said = unet(noisy, times, guidance, text(ids[chosen]))
        return F.mse_loss(said.float(), wanted)

    return _run("diffusion", [unet, text], loss, plan)


def _drawn(pipeline: Pipeline, rows: torch.Tensor, loose: torch.Tensor) -> torch.Tensor:
    return draw(rows, loose, pipeline.side).contiguous(memory_format=torch.channels_last)


def _run(name: str, models: list[nn.Module], loss: Callable[[], torch.Tensor], plan: ImagePlan) -> Curve:
    """Steps until the plan's end; what stays in the models are the averaged weights."""
    torch.manual_seed(plan.seed)
    device = next(models[0].parameters()).device.type
    for model in models:
        model.to(memory_format=torch.channels_last).train()
    weights = [weight for model in models for weight in model.parameters()]
    averaged = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": plan.decay},
            {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=plan.rate,
        betas=(0.9, 0.99),
        fused=device == "cuda",
    )
    curve, losses = Curve(), _Losses(device)
    for step, rate, passed in _steps(plan, curve):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found = loss()
        found.backward()
        nn.utils.clip_grad_norm_(weights, plan.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Early weights are forgotten early.
        with torch.no_grad():
            torch._foreach_lerp_(averaged, weights, 1 - min(plan.average, step / (step + 20)))
        losses.add(found)
        if step == 0 or (step + 1) % plan.report_every == 0:
            mean = losses.mean()
            curve.points.append({"step": step + 1, "loss": mean, "rate": rate, "seconds": passed})
            print(
                f"{name}: step {step + 1:>6}  loss {mean:7.4f}  rate {rate:.2e}  {passed:4.0f} s", flush=True
            )
    with torch.no_grad():
        torch._foreach_copy_(weights, averaged)
    for model in models:
        model.eval()
    return curve


class _Losses:
    """Added up on the device, so that only a report waits for it."""

    def __init__(self, device: str) -> None:
        self._sum, self._count = torch.zeros((), device=device), 0

    def add(self, loss: torch.Tensor) -> None:
        self._sum += loss.detach()
        self._count += 1

    def mean(self) -> float:
        """Of those since the last call."""
        found = float(self._sum) / self._count
        self._sum.zero_()
        self._count = 0
        return found


def _steps(plan: ImagePlan, curve: Curve) -> Iterator[tuple[int, float, float]]:
    """Step, rate and seconds passed; the rate goes up in a line and down in a cosine."""
    began = time.monotonic()
    for step in itertools.count():
        passed = time.monotonic() - began
        done = max(step / plan.steps, passed / 60 / plan.minutes)
        if done >= 1:
            curve.cut_short = step < plan.steps
            curve.seconds = passed
            return
        falling = plan.last_rate + (1 - plan.last_rate) * (1 + math.cos(math.pi * done)) / 2
        yield step, plan.rate * min((step + 1) / plan.warm_up, 1.0) * falling, passed
