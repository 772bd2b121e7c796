"""Makes demo-speech: sounds, windows, training, the folder, its samples, its scores and its card."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo.score import SEED, Score, table
from demo.speech import card, espeak, export, model, recordings, score, sounds, tokens, windows
from demo.speech.train import SpeechPlan, train

NAME = "demo-speech"


@dataclass(frozen=True)
class SpeechSize:
    """How big everything is."""

    shape: model.SpeechShape = model.SpeechShape()
    sounds: int = 60_000
    windows: int = 400_000
    plan: SpeechPlan = SpeechPlan(minutes=4.5)
    scored: int = 200


FULL = SpeechSize()
SMOKE = SpeechSize(
    shape=model.TINY,
    sounds=60,
    windows=64,
    plan=SpeechPlan(steps=12, batch=8, rate=4e-3, warm_up=2, report_every=3),
    scored=2,
)


def with_limit(size: SpeechSize, minutes: float | None) -> SpeechSize:
    if minutes is None:
        return size
    return dataclasses.replace(size, plan=dataclasses.replace(size.plan, minutes=minutes))


def make_speech(out: Path, size: SpeechSize, seed: int, device: str, command: str) -> Path:
    """demo-speech in `out`, with its card."""
    torch.set_float32_matmul_precision("high")
    tokenizer = tokens.learn()
    began = time.monotonic()
    said = sounds.build(seed, size.sounds)
    seconds = len(said.samples) / espeak.RATE
    print(f"{len(said)} sounds, {seconds / 3600:.1f} h: {time.monotonic() - began:.1f} s", flush=True)
    began = time.monotonic()
    rows = windows.build(tokenizer, said.lengths, said.words, said.phrases, seed, size.windows)
    print(f"{len(rows)} windows: {time.monotonic() - began:.1f} s", flush=True)
    torch.manual_seed(seed)
    network = model.new(size.shape, tokenizer).to(device)
    print(f"{model.parameters(network) / 1e6:.2f} M parameters on {device}", flush=True)
    plan = dataclasses.replace(size.plan, seed=seed)
    curve = train(network, said, rows, plan)
    folder = export.save(network, tokenizer, out / NAME)
    recordings.write_samples(folder / recordings.SAMPLES, SEED)
    exported, _ = export.load(folder, device)
    print(f"saved: {folder}", flush=True)
    began = time.monotonic()
    scores = score.score(score.in_torch(exported, tokenizer), size.scored)
    tell(scores)
    print(f"scores: {time.monotonic() - began:.1f} s", flush=True)
    found = {
        "command": command,
        "seed": seed,
        "sounds": len(said),
        "hours": seconds / 3600,
        "windows": len(rows),
        "parameters": model.parameters(exported),
        "device": torch.cuda.get_device_name() if device == "cuda" else "a CPU",
        "torch": torch.__version__,
        "shape": dataclasses.asdict(size.shape),
        "plan": dataclasses.asdict(plan) | {"minutes": None if math.isinf(plan.minutes) else plan.minutes},
        "curve": dataclasses.asdict(curve),
        "scores": score.as_extra(scores),
        "scored": "in torch",
    }
    keep(out / f"{NAME}.json", found)
    card.write(out / f"{NAME}.json", folder)
    return folder


def tell(scores: Sequence[Score]) -> None:
    print(table(scores), flush=True)
    for one in scores:
        for asked, wanted, answered in one.wrong[:3]:
            print(f"  {one.skill}: {asked}\n    wanted {wanted!r}\n    heard  {answered!r}", flush=True)


def keep(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
