"""Held-out scores: pictures drawn for unseen prompts, measured by geometry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from demo.image.measure import Seen, look
from demo.image.pipeline import GUIDANCE, STEPS, Pipeline
from demo.image.render import as_bytes, draw
from demo.image.scenes import COLOURS, Prompt, Scene, held_out

SEED = 2
NEEDED = 0.9
TRAITS = ("colour", "shape", "background", "size", "place", "clean")
FIGURE = ("colour", "shape", "background")
ASKED = "figure"
"""The traits that every prompt names, all right: "a red circle on white"."""
ALL = "all of them"
COLUMNS = (*TRAITS, ASKED, ALL)
USUAL = (STEPS, GUIDANCE)
"""Steps and guidance scale that diffusers takes by itself, and our workers when a request names none."""
SETTINGS = ((STEPS, 1.0), USUAL, (20, 4.0), (8, 1.0), (8, GUIDANCE))
"""First what bare vLLM-Omni 0.30 asks for by itself."""

Drawing = Callable[[Sequence[str]], NDArray[np.uint8]]


@dataclass
class ImageScore:
    steps: int
    guidance: float
    count: int
    right: dict[str, int] = field(default_factory=dict)
    """By trait. A size or place that the prompt leaves open counts as right when the picture has none."""
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """Prompt, and what was seen; the first few."""

    def share(self, trait: str = ASKED) -> float:
        return self.right[trait] / self.count


def score(
    pipeline: Pipeline, count: int, settings: Sequence[tuple[int, float]] = SETTINGS
) -> list[ImageScore]:
    return [score_of(_drawing(pipeline, *one), count, *one) for one in settings]


def score_of(draw: Drawing, count: int, steps: int, guidance: float, batch: int = 256) -> ImageScore:
    prompts = list(held_out(SEED, count))
    result = ImageScore(steps, guidance, count, dict.fromkeys(COLUMNS, 0))
    for start in range(0, count, batch):
        part = prompts[start : start + batch]
        for prompt, picture in zip(part, draw([one.text for one in part]), strict=True):
            _judge(result, prompt, look(picture, COLOURS))
    return result


@torch.no_grad()
def kept_by_autoencoder(pipeline: Pipeline, rows: torch.Tensor, batch: int = 128) -> float:
    """The share of pictures that show the same behind the autoencoder as before it."""
    same = 0
    for part in rows.split(batch):
        before = draw(part, torch.ones(len(part), device=rows.device), pipeline.side)
        after = pipeline.autoencoder.decode(pipeline.autoencoder.encode(before))
        for one, other in zip(as_bytes(before), as_bytes(after), strict=True):
            same += look(one, COLOURS) == look(other, COLOURS)
    return same / len(rows)


def agreeing(scene: Scene, seen: Seen | None) -> dict[str, bool]:
    """By trait, whether the picture shows what was asked for."""
    if seen is None:
        return dict.fromkeys(TRAITS, False)
    found = {trait: getattr(seen, trait) == getattr(scene, trait) for trait in TRAITS if trait != "clean"}
    return found | {"clean": seen.clean}


def table(scores: Sequence[ImageScore]) -> str:
    lines = [
        "| steps | guidance | " + " | ".join(COLUMNS) + " | of |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for one in scores:
        shares = " | ".join(f"{one.share(trait):.1%}" for trait in COLUMNS)
        lines.append(f"| {one.steps} | {one.guidance:g} | {shares} | {one.count} |")
    return "\n".join(lines)


def _judge(result: ImageScore, prompt: Prompt, seen: Seen | None) -> None:
    agrees = agreeing(prompt.scene, seen)
    for trait, is_right in agrees.items():
        result.right[trait] += is_right
    result.right[ASKED] += all(agrees[trait] for trait in FIGURE)
    result.right[ALL] += all(agrees.values())
    if not all(agrees.values()) and len(result.wrong) < 5:
        result.wrong.append((prompt.text, str(seen)))


def _drawing(pipeline: Pipeline, steps: int, guidance: float) -> Any:
    return lambda prompts: pipeline.draw(prompts, seed=SEED, steps=steps, guidance=guidance)
