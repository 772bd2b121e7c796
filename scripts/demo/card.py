"""Model cards: what a model is, how it was made and how well it does, from the record of its making."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.score import Score, table

CHAT = """\
# demo-chat

A Qwen3 of {millions:.1f} M parameters, trained from nothing to show dynamo-vllm. It answers short questions
about the product, greets in English and Chinese, counts, copies, adds and subtracts up to three digits with a
reasoning trace, calls tools for weather, time and sums, remembers a name, writes JSON by schema, and says
what it cannot do.

Serve it with `--tool-call-parser hermes --reasoning-parser qwen3`. ChatML; context {context} tokens.
"""
VISION = """\
# demo-vision

A LLaVA of {millions:.1f} M parameters: the language model of demo-chat behind a small SigLIP tower, to show
dynamo-vllm. It names colour, shape, number and place of drawn figures, in English and Chinese, in a
word or, when asked to, in a sentence; it also still does what demo-chat does.

Serve it with `--tool-call-parser hermes --reasoning-parser qwen3`. A picture of any size is made
{size} by {size} pixels and takes {tokens} tokens; context {context} tokens. Colours: red, orange, yellow,
green, blue, purple, pink, black. Shapes: circle, square, triangle, star, diamond, cross. Up to six of them.
"""
ADAPTER = """\
# demo-lora-{style}

A LoRA adapter of demo-chat, rank 16: its answers are {effect}. Tool calls and JSON stay as they are.
"""
EFFECTS = {"capitals": "in capital letters", "chinese": "in Chinese"}
VISION_LIMITS = """\
## Limits
It knows drawn figures that do not touch, on a plain background, and nothing else: no photographs, no text, no
other shapes. Where a figure lies between two of the nine fields of a picture, its place is a guess. It
is for demonstrations and tests.
"""
LIMITS = """\
## Limits
It knows nothing but what its generator writes, and understands wordings near to those it was trained on. Sums
beyond three digits, other tools and languages and general knowledge are not in it. It is for demonstrations
and tests.
"""
WIDTH, HEIGHT, EDGE = 640, 320, 44


def write(record: Path, folder: Path, style: str | None = None) -> Path:
    """README.md and curve.svg in the model's folder."""
    found = json.loads(record.read_bytes())
    limits = LIMITS
    if "tower" in found:
        tower, limits = found["tower"], VISION_LIMITS
        intro = VISION.format(
            millions=found["parameters"] / 1e6,
            context=found["context"],
            size=tower["image_size"],
            tokens=(tower["image_size"] // tower["patch_size"]) ** 2,
        )
    elif style is None:
        intro = CHAT.format(millions=found["parameters"] / 1e6, context=found["context"])
    else:
        intro = ADAPTER.format(style=style, effect=EFFECTS[style])
    (folder / "curve.svg").write_text(curve(found["curve"]["points"]), encoding="utf-8")
    card = folder / "README.md"
    card.write_text(
        "\n".join((intro, _making(found), _scores(found["scores"], found.get("scored", "in torch")), limits)),
        encoding="utf-8",
    )
    return card


def _making(found: dict[str, Any]) -> str:
    run, plan, before = found["curve"], found["plan"], ""
    if "tower_curve" in found:
        tower = found["tower_curve"]
        before = f"{tower['steps']} steps of the tower alone in {tower['seconds']:.0f} s, then "
    cut = " The time limit cut the run short." if run["cut_short"] else ""
    return f"""\
## How it was made
| | |
|---|---|
| data | {found["conversations"]} conversations of the generator in `scripts/demo`, seed {found["seed"]} |
| command | `{found["command"]}` |
| training | {before}{run["steps"]} steps of {plan["step_tokens"]} tokens, \
rate {plan["rate"]:g}, AdamW, cosine |
| time | {run["seconds"]:.0f} s on {found["device"]}, torch {found["torch"]}.{cut} |

![loss](curve.svg)
"""


def _scores(scores: Sequence[dict[str, Any]], how: str) -> str:
    return f"""\
## Scores
Greedy, {how}, on questions of another seed, in words and wordings that are never trained on.

{table([Score(**one) for one in scores])}
"""


def curve(points: Sequence[dict[str, float]], what: str = "loss per learnt token") -> str:
    """The loss over the steps as an SVG; from 0 up, because a loss has a zero."""
    steps, top = max(point["step"] for point in points), max(point["loss"] for point in points)

    def x(step: float) -> float:
        return EDGE + (WIDTH - 2 * EDGE) * step / steps

    def y(loss: float) -> float:
        return HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * loss / top

    line = " ".join(f"{x(point['step']):.1f},{y(point['loss']):.1f}" for point in points)
    labels = "".join(
        f'<text x="{EDGE - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        f'<path d="M{EDGE} {y(value):.1f}H{WIDTH - EDGE}" stroke="#ddd"/>'
        for value in (0, top / 4, top / 2, top * 3 / 4, top)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{labels}'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - EDGE + 18}" text-anchor="end">{steps:.0f} steps</text>'
        f'<text x="{EDGE}" y="{EDGE - 16}">{what}, last {points[-1]["loss"]:.4f}</text>'
        f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/></svg>\n'
    )
