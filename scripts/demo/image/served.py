"""The sheet of example pictures, drawn by a running deployment: the picture in docs/omni.md."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.image.card import SHEET, png, sheet

SECONDS = 120.0


def draw_sheet(url: str, model: str, out: Path) -> Path:
    """The prompts of the model's card, one request each."""
    pictures = np.stack([_drawn(url, model, prompt, seed) for seed, prompt in enumerate(SHEET, 1)])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(png(sheet(pictures)))
    return out


def _drawn(url: str, model: str, prompt: str, seed: int) -> NDArray[np.uint8]:
    from PIL import Image

    body = {"model": model, "prompt": prompt, "nvext": {"seed": seed}}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/images/generations",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        (made,) = json.load(answer)["data"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(made["b64_json"]))).convert("RGB"))
