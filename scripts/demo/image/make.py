"""Makes demo-image: prompts, both trainings, the folder, its scores and its card."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from demo.image import card, export, score
from demo.image.pipeline import TINY, Pipeline, Shapes
from demo.image.render import Scenes
from demo.image.scenes import train_prompt
from demo.image.text import ids_of, learn_tokens
from demo.image.train import ImagePlan, train_autoencoder, train_diffusion
from demo.train import Curve

NAME = "demo-image"
AUTOENCODER_TIME = 0.25
"""Of a time limit."""


@dataclass(frozen=True)
class ImageSize:
    """How big everything is."""

    shapes: Shapes = Shapes()
    prompts: int = 200_000
    tokenizer_examples: int = 20_000
    autoencoder: ImagePlan = ImagePlan(steps=3000, batch=256, rate=2e-3, average=0.995)
    diffusion: ImagePlan = ImagePlan(steps=14_000, batch=512, rate=1e-3, report_every=200)
    scored: int = 512
    settings: tuple[tuple[int, float], ...] = score.SETTINGS


SMOKE = ImageSize(
    shapes=TINY,
    prompts=300,
    tokenizer_examples=300,
    autoencoder=ImagePlan(steps=12, batch=4, rate=4e-3, warm_up=2, average=0.5, report_every=4),
    diffusion=ImagePlan(steps=12, batch=8, rate=4e-3, warm_up=2, average=0.5, report_every=4),
    scored=4,
    settings=((4, 7.5), (2, 1.0)),
)


def with_limit(size: ImageSize, minutes: float | None) -> ImageSize:
    """Both trainings within so many minutes."""
    if minutes is None:
        return size
    return dataclasses.replace(
        size,
        autoencoder=dataclasses.replace(size.autoencoder, minutes=minutes * AUTOENCODER_TIME),
        diffusion=dataclasses.replace(size.diffusion, minutes=minutes * (1 - AUTOENCODER_TIME)),
    )


FULL = with_limit(ImageSize(), 5.5)


def make_image(out: Path, size: ImageSize, seed: int, device: str, command: str) -> Path:
    """demo-image in `out`, with its card."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    began = time.monotonic()
    tokenizer = learn_tokens(seed, size.tokenizer_examples)
    prompts = [train_prompt(seed, index) for index in range(size.prompts)]
    ids = ids_of(tokenizer, [prompt.text for prompt in prompts]).to(device)
    rows = Scenes.of([prompt.scene for prompt in prompts]).rows.to(device)
    print(f"{len(prompts)} prompts: {time.monotonic() - began:.1f} s", flush=True)
    torch.manual_seed(seed)
    shapes = dataclasses.replace(
        size.shapes,
        text=dataclasses.replace(size.shapes.text, vocab_size=tokenizer.get_vocab_size()),
    )
    pipeline = Pipeline(tokenizer, shapes).to(device)
    print(f"{pipeline.parameters() / 1e6:.2f} M parameters on {device}", flush=True)
    plans = {
        "autoencoder": dataclasses.replace(size.autoencoder, seed=seed),
        "diffusion": dataclasses.replace(size.diffusion, seed=seed),
    }
    curves = {"autoencoder": train_autoencoder(pipeline, rows, plans["autoencoder"])}
    share = score.kept_by_autoencoder(pipeline, rows[: size.scored])
    print(f"autoencoder: {share:.1%} of the figures are seen as before", flush=True)
    curves["diffusion"] = train_diffusion(pipeline, ids, rows, plans["diffusion"])
    folder = export.save(pipeline, out / NAME)
    record = out / f"{NAME}.json"
    exported = export.load(folder, device)
    _record(record, exported, size, plans, curves, [], command)
    print(f"saved: {folder}", flush=True)
    began = time.monotonic()
    scores = score.score(exported, size.scored, size.settings)
    tell(scores)
    print(f"scores: {time.monotonic() - began:.1f} s", flush=True)
    _record(record, exported, size, plans, curves, scores, command)
    card.write(record, folder, exported)
    return folder


def tell(scores: list[score.ImageScore]) -> None:
    print(score.table(scores), flush=True)
    for one in scores:
        for prompt, seen in one.wrong[:2]:
            print(f"  {one.steps} steps, {one.guidance:g}: {prompt!r}\n    {seen}", flush=True)


def _record(
    path: Path,
    pipeline: Pipeline,
    size: ImageSize,
    plans: dict[str, ImagePlan],
    curves: dict[str, Curve],
    scores: list[score.ImageScore],
    command: str,
) -> None:
    """All that the card tells."""
    on_gpu = pipeline.device.type == "cuda"
    found = {
        "command": command,
        "seed": plans["diffusion"].seed,
        "prompts": size.prompts,
        "parameters": pipeline.parameters(),
        "device": torch.cuda.get_device_name() if on_gpu else "a CPU",
        "torch": torch.__version__,
        "shapes": dataclasses.asdict(pipeline.shapes),
        "plans": {
            name: dataclasses.asdict(plan) | {"minutes": None if math.isinf(plan.minutes) else plan.minutes}
            for name, plan in plans.items()
        },
        "curves": {name: dataclasses.asdict(curve) for name, curve in curves.items()},
        "scores": [dataclasses.asdict(one) for one in scores],
    }
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
