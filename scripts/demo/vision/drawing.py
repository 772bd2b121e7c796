"""Draws scenes with Pillow: what a client would send, and an eye that the training's painter never saw."""

from __future__ import annotations

import base64
import io
import math
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demo.vision.figures import Figure, Scene, corners

FINER = 4
"""Drawn so many times larger and made smaller: smooth edges."""
DARKER = 0.55
"""Of an outline, of the figure's colour."""


def draw(scene: Scene, size: int, noise_seed: int | None = None) -> NDArray[np.uint8]:
    """Bytes [size, size, 3]; with a seed there is light noise on it."""
    from PIL import Image, ImageDraw

    large = size * FINER
    image = Image.new("RGB", (large, large), scene.background)
    pen = ImageDraw.Draw(image)
    for figure in scene.figures:
        r, g, b = figure.tint
        if figure.outline:
            _fill(pen, figure, large, 0.0, (int(r * DARKER), int(g * DARKER), int(b * DARKER)))
        _fill(pen, figure, large, figure.outline, figure.tint)
    small = np.asarray(image.resize((size, size), Image.Resampling.BOX), np.float64)
    if noise_seed is not None:
        rng = np.random.default_rng(noise_seed)
        small = small + rng.normal(0, rng.uniform(0, 5), small.shape)
    return np.clip(np.rint(small), 0, 255).astype(np.uint8)


def data_url(picture: NDArray[np.uint8]) -> str:
    """As a client of the OpenAI API sends it."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def noise_seed(scene: Scene) -> int:
    """The same picture whenever a scene is drawn."""
    return random.Random(repr(scene)).randrange(2**32)


def _fill(pen: Any, figure: Figure, size: int, inset: float, colour: tuple[int, int, int]) -> None:
    """The figure without an edge of `inset`."""
    x, y = figure.x * size, figure.y * size
    if figure.shape == "circle":
        r = (figure.radius - inset) * size
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        return
    points = [
        _turned(px * figure.radius, py * figure.radius, figure.turn) for px, py in corners(figure.shape)
    ]
    if inset:
        points = _inside(points, inset)
    pen.polygon([(x + px * size, y + py * size) for px, py in points], fill=colour)


def _turned(x: float, y: float, turn: float) -> tuple[float, float]:
    cos, sin = math.cos(turn), math.sin(turn)
    return x * cos - y * sin, x * sin + y * cos


def _inside(points: list[tuple[float, float]], by: float) -> list[tuple[float, float]]:
    """The corners where all sides have moved inwards; they go round clockwise on the screen."""
    found = []
    for index, (x, y) in enumerate(points):
        before, after = points[index - 1], points[(index + 1) % len(points)]
        ax, ay = _inwards(before, (x, y))
        bx, by_ = _inwards((x, y), after)
        scale = by / (1 + ax * bx + ay * by_)
        found.append((x + (ax + bx) * scale, y + (ay + by_) * scale))
    return found


def _inwards(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy)
    return -dy / length, dx / length
