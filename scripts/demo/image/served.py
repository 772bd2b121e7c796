"""Pictures drawn by a running deployment, over HTTP: for the scores, and for docs/omni.md."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.image.card import SHEET, png, sheet
from demo.image.score import SEED, ImageScore, score_of

SECONDS = 120.0
AT_ONCE = 2


def score(url: str, model: str, count: int, settings: Sequence[tuple[int, float]]) -> list[ImageScore]:
    def drawn(prompts: Sequence[str], steps: int, guidance: float) -> NDArray[np.uint8]:
        asked = {"num_inference_steps": steps, "guidance_scale": guidance}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(
                lambda one: _drawn(url, model, one[1], {**asked, "seed": SEED + one[0]}), enumerate(prompts)
            )
            return np.stack(list(found))

    def in_setting(steps: int, guidance: float) -> ImageScore:
        return score_of(lambda prompts: drawn(prompts, steps, guidance), count, steps, guidance)

    return [in_setting(*one) for one in settings]


def draw_sheet(url: str, model: str, out: Path) -> Path:
    """The prompts of the model's card, one request each."""
    pictures = np.stack([_drawn(url, model, prompt, {"seed": seed}) for seed, prompt in enumerate(SHEET, 1)])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(png(sheet(pictures)))
    return out


def _drawn(url: str, model: str, prompt: str, asked: dict[str, float]) -> NDArray[np.uint8]:
    from PIL import Image

    body = {"model": model, "prompt": prompt, "nvext": asked}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/images/generations",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        (made,) = json.load(answer)["data"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(made["b64_json"]))).convert("RGB"))
