"""Trains demo-vision: first the new tower alone, then all of it, with the language model of demo-chat.

The tower learns to say, patch by patch, which figure has its centre there. So it sees figures long before the
answers could have taught it to, and without the cost of the language model; what says so is thrown away
afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.batches import Batch, Batches, copied
from demo.corpus import Data
from demo.train import Curve, Plan, at_answers, compile_layers, follow
from demo.vision.figures import COLOURS, SHAPES
from demo.vision.model import Llava, pixels_of
from demo.vision.painting import centres, paint
from demo.vision.rows import COLUMNS, Rows

LENGTHS = (256, 384)
"""Of conversations about pictures; few, since each is compiled."""
TALK_LENGTHS = (256, 384, 1024)
TALK_SHARE = 4
"""One of so many batches is of demo-chat's conversations, so that it still talks."""
ALONE = 5
"""The tower is alone for at most one part of so many of the time, and for half as many steps."""
EMPTY = 0.2
"""Weight of patches without a figure: they are many."""


class Spotter(nn.Module):
    """Says of each patch what stands there; only for training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape = nn.Linear(width, len(SHAPES) + 1)
        self.colour = nn.Linear(width, len(COLOURS) + 1)
        self.field = nn.Linear(width, 9 + 1)

    def loss(self, patches: Tensor, figures: Tensor, side: int) -> Tensor:
        found = centres(figures, side)
        total = patches.new_zeros((), dtype=torch.float)
        for head, wanted in zip((self.shape, self.colour, self.field), found, strict=True):
            weight = torch.ones(head.out_features, device=patches.device)
            weight[0] = EMPTY
            total = total + F.cross_entropy(head(patches).float().flatten(0, 1), wanted.flatten(), weight)
        return total

    def share(self, patches: Tensor, figures: Tensor, side: int) -> float:
        """Of the figures, those whose shape, colour and field are all right."""
        shape, colour, field = centres(figures, side)
        right = (
            (self.shape(patches).argmax(-1) == shape)
            & (self.colour(patches).argmax(-1) == colour)
            & (self.field(patches).argmax(-1) == field)
        )
        return float(right[shape > 0].float().mean())


class Looking:
    """Batches of conversations with their pictures, painted anew each time."""

    def __init__(self, rows: Rows, plan: Plan, size: int, device: str) -> None:
        self.starts, self.size, self.device = rows.starts, size, device
        self.figures = torch.from_numpy(rows.scenes.figures).to(device)
        self.backgrounds = torch.from_numpy(rows.scenes.backgrounds).to(device)
        self.batches = Batches(rows.data, plan.batch_tokens, plan.seed, device, LENGTHS, rows.shown)

    def __iter__(self) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Rows, the figures of their scenes, and the pictures."""
        for batch in self.batches:
            chosen = [at for row in batch.rows for at in range(self.starts[row], self.starts[row + 1])]
            where = copied(np.array(chosen), self.device)
            yield batch, *self._painted(self.figures[where], where)

    def any(self, count: int) -> tuple[Tensor, Tensor]:
        """Some of all scenes, half of them mirrored: their figures and the pictures."""
        where = torch.randint(len(self.figures), (count,), device=self.device)
        figures, mirrored = self.figures[where], torch.rand(count, 1, device=self.device) < 0.5
        for column, there in (("x", 1.0), ("turn", 0.0)):
            at = COLUMNS.index(column)
            figures[..., at] = torch.where(mirrored, there - figures[..., at], figures[..., at])
        return self._painted(figures, where)

    def _painted(self, figures: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        return figures, paint(figures, self.backgrounds[where], self.size)


def train(
    model: Llava, rows: Rows, talk: Data, plan: Plan, *, tower_sees: bool = False
) -> tuple[Curve, Curve]:
    """What it was like with the tower alone, unless it sees already, and with all of it."""
    torch.manual_seed(plan.seed)
    device = next(model.parameters()).device.type
    spotter = Spotter(model.tower.hidden_size).to(device)
    looking = Looking(rows, plan, model.tower.image_size, device)
    first = replace(plan, steps=max(1, plan.steps // 2), minutes=plan.minutes / ALONE)
    alone = Curve() if tower_sees else _train_tower(model, spotter, looking, first, device)
    rest = replace(plan, minutes=plan.minutes - alone.seconds / 60)
    return alone, _train_all(model, spotter, looking, talk, rest, device)


def _train_tower(model: Llava, spotter: Spotter, looking: Looking, plan: Plan, device: str) -> Curve:
    count = max(8, plan.step_tokens // 2 // model.tower.tokens)

    def learn() -> Tensor:
        figures, pictures = looking.any(count)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = spotter.loss(model.vision_tower(pixels_of(pictures)), figures, model.tower.side)
        loss.backward()
        return loss.detach()[None]

    weights = [*model.vision_tower.parameters(), *spotter.parameters()]
    curve = follow(plan, weights, device, learn, ("spotting",))
    with torch.no_grad():
        figures, pictures = looking.any(count)
        seen = spotter.share(model.vision_tower(pixels_of(pictures)), figures, model.tower.side)
    print(f"the tower alone names {seen:.1%} of the figures", flush=True)
    return curve


def _train_all(
    model: Llava, spotter: Spotter, looking: Looking, talk: Data, plan: Plan, device: str
) -> Curve:
    if plan.compiles and device == "cuda":
        compile_layers(model.language_model)
    looks = max(1, plan.step_tokens // plan.batch_tokens * (TALK_SHARE - 1) // TALK_SHARE)
    seeing = iter(looking)
    talking = iter(Batches(talk, plan.batch_tokens, plan.seed, device, TALK_LENGTHS))

    def learn() -> Tensor:
        """Answers about pictures, what is where, and talk: each a mean of its own."""
        total = torch.zeros(3, device=device)
        for batch, figures, pictures in itertools.islice(seeing, looks):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                patches = model.vision_tower(pixels_of(pictures))
                spotted = spotter.loss(patches, figures, model.tower.side) / looks
                answered = _answers(model, model.embed(batch.ids, patches), batch) / looks
            (answered + spotted).backward()
            total[0] += answered.detach()
            total[1] += spotted.detach()
        batch = next(talking)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            said = _answers(model, model.language_model.model.embed_tokens(batch.ids), batch)
        (said / TALK_SHARE).backward()
        total[2] += said.detach()
        return total

    weights = [*model.parameters(), *spotter.parameters()]
    return follow(plan, weights, device, learn, ("loss", "spotting", "talk"))


def _answers(model: Llava, x: Tensor, batch: Batch) -> Tensor:
    logits = model.language_model.logits(at_answers(model.language_model.from_embedded(x), batch))
    return F.cross_entropy(logits.float(), batch.targets)
