"""Trains a LoRA adapter on a model that stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from demo.export import AdapterSettings
from demo.model import Qwen3

SETTINGS = AdapterSettings(
    rank=16, alpha=32, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)


class Adapted(nn.Module):
    """A frozen matrix and what is added to it."""

    def __init__(self, base: nn.Linear, settings: AdapterSettings) -> None:
        super().__init__()
        self.base = base
        self.scale = settings.alpha / settings.rank
        self.lora_A = nn.Linear(base.in_features, settings.rank, bias=False)
        self.lora_B = nn.Linear(settings.rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.to(base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scale


@dataclass(frozen=True)
class Adapter:
    """An adapter that is in a model."""

    model: Qwen3
    settings: AdapterSettings

    def trainable(self) -> list[nn.Parameter]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def weights(self) -> dict[str, Tensor]:
        """By PEFT's names: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
        return {name: value for name, value in self.model.state_dict().items() if ".lora_" in name}


def put_in(model: Qwen3, settings: AdapterSettings = SETTINGS, seed: int = 1) -> Adapter:
    """Freeze the model and put a new adapter into it, which changes nothing yet."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in settings.targets and isinstance(child, nn.Linear):
                setattr(parent, name, Adapted(child, settings))
    return Adapter(model, settings)


def take_out(model: Qwen3) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Adapted):
                setattr(parent, name, child.base)
