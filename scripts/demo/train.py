"""Trains a model: AdamW, a cosine, bf16 on a GPU."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from demo.batches import Batch, Batches
from demo.corpus import Data
from demo.model import Qwen3


@dataclass(frozen=True)
class Plan:
    """How to train."""

    steps: int = 5000
    step_tokens: int = 131_072
    batch_tokens: int = 32_768
    """A step adds up the gradients of several batches, so that every step sees all lengths."""
    rate: float = 2e-3
    last_rate: float = 0.02
    """Of the rate, at the end."""
    warm_up: int = 200
    decay: float = 0.05
    clip: float = 1.0
    minutes: float = math.inf
    """The rate falls faster when time would run out; a run that met this limit is not exactly repeatable."""
    seed: int = 1
    compiles: bool = True
    """Fused kernels, on a GPU."""
    report_every: int = 100


@dataclass
class Curve:
    """What a run was like."""

    points: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    cut_short: bool = False


def train(model: Qwen3, data: Data, plan: Plan, weights: Iterable[nn.Parameter] | None = None) -> Curve:
    """Train all of the model, or only some weights."""
    torch.manual_seed(plan.seed)
    device = next(model.parameters()).device.type
    if plan.compiles and device == "cuda":
        compile_layers(model)
    batches = iter(Batches(data, plan.batch_tokens, plan.seed, device))

    def learn() -> torch.Tensor:
        return _learn(model, _of_one_step(batches, plan), device)

    return follow(plan, weights or model.parameters(), device, learn)


def follow(
    plan: Plan,
    weights: Iterable[nn.Parameter],
    device: str,
    learn: Callable[[], torch.Tensor],
    parts: Sequence[str] = ("loss",),
) -> Curve:
    """Update the weights as planned; `learn` adds up the gradients of one step and gives its losses."""
    chosen = [weight for weight in weights if weight.requires_grad]
    optimizer = _optimizer(chosen, plan, fused=device == "cuda")
    curve, began = Curve(), time.monotonic()
    recent = torch.zeros(len(parts), device=device)
    for step in itertools.count():
        passed = time.monotonic() - began
        done = max(step / plan.steps, passed / 60 / plan.minutes)
        if done >= 1:
            curve.cut_short = step < plan.steps
            break
        rate = plan.rate * _share(step, done, plan)
        for group in optimizer.param_groups:
            group["lr"] = rate
        recent += learn()
        nn.utils.clip_grad_norm_(chosen, plan.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.steps = step + 1
        curve.tokens += plan.step_tokens
        if (step + 1) % plan.report_every == 0:
            losses = dict(zip(parts, (recent / plan.report_every).tolist(), strict=True))
            recent.zero_()
            passed = time.monotonic() - began
            curve.points.append({"step": step + 1, **losses, "rate": rate, "seconds": passed})
            speed = curve.tokens / passed / 1e3
            shown = "  ".join(f"{name} {value:7.4f}" for name, value in losses.items())
            print(
                f"step {step + 1:>6}  {shown}  rate {rate:.2e}  {speed:5.0f} k/s  {passed:4.0f} s", flush=True
            )
    curve.seconds = time.monotonic() - began
    return curve


def _learn(model: Qwen3, batches: list[Batch], device: str) -> torch.Tensor:
    """The loss is the mean over all learnt tokens of the step."""
    learnt, total = sum(len(batch.targets) for batch in batches), torch.zeros((), device=device)
    for batch in batches:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model.logits(at_answers(model(batch.ids), batch))
        loss = F.cross_entropy(logits.float(), batch.targets, reduction="sum") / learnt
        loss.backward()
        total += loss.detach()
    return total


def at_answers(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Only where something is learnt: the head is the widest part."""
    return hidden.flatten(0, 1).index_select(0, batch.answers)


def _of_one_step(batches: Iterator[Batch], plan: Plan) -> list[Batch]:
    return list(itertools.islice(batches, max(1, plan.step_tokens // plan.batch_tokens)))


def _share(step: int, done: float, plan: Plan) -> float:
    """Of the rate: up in a line, down in a cosine."""
    falling = plan.last_rate + (1 - plan.last_rate) * (1 + math.cos(math.pi * done)) / 2
    return min((step + 1) / plan.warm_up, 1.0) * falling


def _optimizer(weights: list[nn.Parameter], plan: Plan, *, fused: bool) -> torch.optim.Optimizer:
    """Matrices decay, norms do not."""
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": plan.decay},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=fused)


def compile_layers(model: Qwen3) -> None:
    """Layer by layer: they are alike, so each length is compiled once and not eight times."""
    torch._dynamo.config.cache_size_limit = 64
    for layer in model.model.layers:
        layer.compile(dynamic=False)
