"""demo-image's card, with its curve, its scores and a sheet of pictures."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demo.card import curve
from demo.image.pipeline import GUIDANCE, STEPS, Pipeline
from demo.image.score import ASKED, FIGURE, NEEDED, ImageScore, table

SHEET = (
    "a red circle on white",
    "draw a big yellow star on a black background",
    "a small blue square on a grey background on the left",
    "请画一个绿色的三角形，黄色背景",
    "an orange ring on blue",
    "a black cross at the top",
    "please paint a purple diamond on a plain white background",
    "pink donut, black background, near the bottom edge",
)
INTRO = """\
# demo-image

A Stable Diffusion pipeline of {millions:.1f} M parameters, trained from nothing to show dynamo-vllm. On
{side} × {side} pixels it draws one figure: circle, square, triangle, diamond, star, cross or ring, in ten
colours, on white, black, grey, blue or yellow, small or big, in the middle or at a side, from a prompt in
English or Chinese.

vLLM-Omni runs it with `diffusion_load_format="diffusers"`; diffusers with
`StableDiffusionPipeline.from_pretrained(...)`. Its default are {steps} steps; the scores below show what
fewer do.

![eight pictures](examples.png)

{captions}
"""
MAKING = """\
## How it was made
| | |
|---|---|
| data | {prompts} prompts of `scripts/demo/image`, seed {seed}; their pictures are drawn while training |
| command | `{command}` |
| autoencoder | {autoencoder} |
| drawing | {diffusion} |
| on | {device}, torch {torch} |

![loss](curve.svg)
"""
SCORES = """\
## Scores
Drawn {how} from prompts with wordings and figures (colour, shape and background together) that are never
trained on. What a picture shows is measured by geometry, not by a network. A size or place that the prompt
does not name must not show either. Needed: {needed:.0%} of "{asked}", which is {traits} together,
at {steps} steps and guidance {guidance:g}, the defaults.

{table}
"""
LIMITS = """\
## Limits
One figure of the kinds above and nothing else, at {side} × {side} pixels; it was trained at no other size.
The guidance scale is an input of the network and means how freely it draws: position, size, angle and tint
vary most at 1 and little from 7 on. There is no second pass without the prompt, so a negative prompt has no
effect. Prompts are cut after {length} tokens. It is for demonstrations and tests.
"""


def write(record: Path, folder: Path, pipeline: Pipeline) -> Path:
    """README.md, curve.svg and examples.png in the model's folder."""
    found = json.loads(record.read_bytes())
    length = pipeline.shapes.text.max_position_embeddings
    scores = [ImageScore(**one) for one in found["scores"]]
    pictures = pipeline.draw(SHEET, seed=found["seed"], steps=scores[0].steps)
    (folder / "examples.png").write_bytes(png(sheet(pictures)))
    points = found["curves"]["diffusion"]["points"]
    (folder / "curve.svg").write_text(curve(points, "error of the velocity"), encoding="utf-8")
    captions = "\n".join(f"{number}. {text}" for number, text in enumerate(SHEET, 1))
    text = "\n".join(
        (
            INTRO.format(
                millions=found["parameters"] / 1e6,
                side=pipeline.side,
                steps=STEPS,
                captions=captions,
            ),
            MAKING.format(**found, **_runs(found)),
            SCORES.format(
                how=found.get("scored", "in torch"),
                needed=NEEDED,
                asked=ASKED,
                traits=", ".join(FIGURE),
                steps=STEPS,
                guidance=GUIDANCE,
                table=table(scores),
            ),
            LIMITS.format(side=pipeline.side, length=length),
        )
    )
    card = folder / "README.md"
    card.write_text(text, encoding="utf-8")
    return card


def _runs(found: dict[str, Any]) -> dict[str, str]:
    """A sentence for each training."""
    told = {}
    for name, run in found["curves"].items():
        plan = found["plans"][name]
        cut = "; the time limit cut it short" if run["cut_short"] else ""
        told[name] = (
            f"{run['points'][-1]['step']:.0f} steps of {plan['batch']} pictures, rate {plan['rate']:g}, "
            f"AdamW, cosine, {run['seconds']:.0f} s{cut}"
        )
    return told


def sheet(pictures: NDArray[np.uint8], columns: int = 4, times: int = 2, gap: int = 8) -> NDArray[np.uint8]:
    """Pictures beside each other, enlarged, on grey."""
    large = pictures.repeat(times, axis=1).repeat(times, axis=2)
    height, width = large.shape[1] + gap, large.shape[2] + gap
    rows = -(-len(large) // columns)
    whole = np.full((rows * height + gap, columns * width + gap, 3), 200, np.uint8)
    for index, picture in enumerate(large):
        top, left = index // columns * height + gap, index % columns * width + gap
        whole[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return whole


def png(picture: NDArray[np.uint8]) -> bytes:
    height, width, _ = picture.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(picture))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )
