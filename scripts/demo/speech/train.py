"""Trains demo-speech: the decoder on what is to be said, the encoder also on the words alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import WhisperForConditionalGeneration

from demo.speech import hearing
from demo.speech.phrases import vocabulary
from demo.speech.sounds import Sounds
from demo.speech.windows import IGNORED, UNKNOWN, Windows
from demo.train import Curve, Plan, follow


@dataclass(frozen=True)
class SpeechPlan:
    """How to train; rates and limits as in `Plan`."""

    steps: int = 8000
    batch: int = 256
    """Windows of a step."""
    rate: float = 1.5e-3
    warm_up: int = 400
    minutes: float = math.inf
    words: float = 1.0
    """Weight of the second loss: the encoder tells of each frame what word it is part of, with a head that is
    thrown away. Without it the decoder takes long to find out where to look."""
    smoothing: float = 0.05
    seed: int = 1
    report_every: int = 100

    def plain(self) -> Plan:
        return Plan(
            steps=self.steps,
            step_tokens=self.batch,
            rate=self.rate,
            warm_up=self.warm_up,
            minutes=self.minutes,
            seed=self.seed,
            report_every=self.report_every,
            decay=0.02,
        )


class Trainer:
    """Batches on the device, and the two losses of a step."""

    def __init__(
        self, model: WhisperForConditionalGeneration, sounds: Sounds, windows: Windows, plan: SpeechPlan
    ) -> None:
        self.model, self.plan = model, plan
        self.device = next(model.parameters()).device
        self.namer = nn.Linear(model.config.d_model, len(vocabulary()) + 1).to(self.device)
        self._samples = torch.from_numpy(sounds.samples).to(self.device)
        self._starts = torch.from_numpy(sounds.starts).to(self.device)
        self._rows = [
            torch.from_numpy(rows).to(self.device)
            for rows in (
                windows.sounds,
                windows.places,
                windows.ends,
                windows.ids,
                windows.learnt,
                windows.frames,
            )
        ]
        self._chance = torch.Generator(self.device).manual_seed(plan.seed)
        self._order = torch.empty(0, dtype=torch.long, device=self.device)
        self.weights = [*model.parameters(), *self.namer.parameters()]

    def learn(self) -> torch.Tensor:
        """Gradients of one batch, and its losses."""
        sounds, places, ends, ids, learnt, frames = self._next()
        with torch.no_grad():
            mels = self._heard(sounds, places, ends)
        longest = int((learnt != IGNORED).any(0).nonzero().max()) + 1
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            heard = self.model.model.encoder(mels).last_hidden_state
            said = self.model(encoder_outputs=(heard,), decoder_input_ids=ids[:, :longest].long())
            named = self.namer(heard)
        loss = F.cross_entropy(
            said.logits.float().flatten(0, 1),
            learnt[:, :longest].long().flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.plan.smoothing,
        )
        words = F.cross_entropy(named.float().flatten(0, 1), frames.long().flatten(), ignore_index=UNKNOWN)
        (loss + self.plan.words * words).backward()
        return torch.stack((loss.detach(), words.detach()))

    def _heard(self, sounds: torch.Tensor, places: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        loudness = 0.3 + 0.7 * torch.rand(sounds.shape, device=self.device, generator=self._chance)
        window = hearing.lay_out(self._samples, self._starts, sounds, places, loudness)
        window = hearing.worsen(window, ends, self._chance)
        return hearing.masked(hearing.log_mel(window), self._chance)

    def _next(self) -> tuple[Any, ...]:
        """Every window once, in a new order each time."""
        if len(self._order) < self.plan.batch:
            self._order = torch.randperm(len(self._rows[0]), device=self.device, generator=self._chance)
        chosen, self._order = self._order[: self.plan.batch], self._order[self.plan.batch :]
        return tuple(rows[chosen] for rows in self._rows)


def train(
    model: WhisperForConditionalGeneration, sounds: Sounds, windows: Windows, plan: SpeechPlan
) -> Curve:
    torch.manual_seed(plan.seed)
    trainer = Trainer(model.train(), sounds, windows, plan)
    return follow(plan.plain(), trainer.weights, trainer.device.type, trainer.learn, ("loss", "words"))
