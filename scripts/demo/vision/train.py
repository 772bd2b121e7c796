"""Trains demo-vision: a new tower before the language model of demo-chat, all of it at once.

The tower also learns to say, patch by patch, which figure has its centre there. So it sees figures long
before the answers could have taught it to; what says so is thrown away afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.batches import Batch, Batches
from demo.corpus import Data
from demo.train import Curve, Plan, compile_layers, follow
from demo.vision.figures import COLOURS, SHAPES
from demo.vision.model import Llava, pixels_of
from demo.vision.painting import centres, paint
from demo.vision.rows import Rows

LENGTHS = (256, 320, 384)
"""Of conversations about pictures; few, since each is compiled."""
TALK_LENGTHS = (256, 512, 1024)
TALK_SHARE = 4
"""One of so many batches is of demo-chat's conversations, so that it still talks."""
EMPTY = 0.2
"""Weight of patches without a figure: they are many."""


class Spotter(nn.Module):
    """Says of each patch what stands there; only for training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape = nn.Linear(width, len(SHAPES) + 1)
        self.colour = nn.Linear(width, len(COLOURS) + 1)

    def loss(self, patches: Tensor, figures: Tensor, side: int) -> Tensor:
        found = centres(figures, side)
        total = patches.new_zeros((), dtype=torch.float)
        for head, wanted in zip((self.shape, self.colour), found, strict=True):
            weight = torch.ones(head.out_features, device=patches.device)
            weight[0] = EMPTY
            total = total + F.cross_entropy(head(patches).float().flatten(0, 1), wanted.flatten(), weight)
        return total


class Looking:
    """Batches of conversations with their pictures, painted anew each time."""

    def __init__(self, rows: Rows, plan: Plan, size: int, device: str) -> None:
        self.starts, self.size = rows.starts, size
        self.figures = torch.from_numpy(rows.scenes.figures).to(device)
        self.backgrounds = torch.from_numpy(rows.scenes.backgrounds).to(device)
        self.batches = Batches(rows.data, plan.batch_tokens, plan.seed, device, LENGTHS, rows.shown)

    def __iter__(self) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Rows, the figures of their scenes, and the pictures."""
        for batch in self.batches:
            chosen = [at for row in batch.rows for at in range(self.starts[row], self.starts[row + 1])]
            where = torch.tensor(chosen, device=self.figures.device)
            figures = self.figures[where]
            yield batch, figures, paint(figures, self.backgrounds[where], self.size)


def train(model: Llava, rows: Rows, talk: Data, plan: Plan) -> Curve:
    torch.manual_seed(plan.seed)
    device = next(model.parameters()).device.type
    if plan.compiles and device == "cuda":
        compile_layers(model.language_model)
    spotter = Spotter(model.tower.hidden_size).to(device)
    looking = iter(Looking(rows, plan, model.tower.image_size, device))
    talking = iter(Batches(talk, plan.batch_tokens, plan.seed, device, TALK_LENGTHS))
    looks = max(1, plan.step_tokens // plan.batch_tokens * (TALK_SHARE - 1) // TALK_SHARE)

    def learn() -> Tensor:
        """Answers about pictures, what is where, and talk: each a mean of its own."""
        total = torch.zeros(3, device=device)
        for batch, figures, pictures in itertools.islice(looking, looks):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                patches = model.vision_tower(pixels_of(pictures))
                spotted = spotter.loss(patches, figures, model.tower.side) / looks
                answered = _answers(model, model.embed(batch.ids, patches), batch) / looks
            (answered + spotted).backward()
            total += torch.stack((answered.detach(), spotted.detach(), torch.zeros_like(spotted.detach())))
        batch = next(talking)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            said = _answers(model, model.language_model.model.embed_tokens(batch.ids), batch)
        (said / TALK_SHARE).backward()
        total[2] += said.detach()
        return total

    weights = itertools.chain(model.parameters(), spotter.parameters())
    return follow(plan, list(weights), device, learn, ("loss", "spotting", "talk"))


def _answers(model: Llava, x: Tensor, batch: Batch) -> Tensor:
    wanted = batch.targets >= 0
    logits = model.language_model.logits(model.language_model.from_embedded(x)[wanted])
    return F.cross_entropy(logits.float(), batch.targets[wanted])
