"""What a picture shows, found by geometry alone: background, colour, shape, size and place of one figure.

It knows the named colours and nothing of the network or of how pictures are drawn. The outline is read as a
radius for each direction from the middle: a triangle has three waves in it, a star five.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.float64]
"""[height, width, 3], from 0 to 255."""
DIRECTIONS = 180
WAVE = 0.055
"""Of the mean radius: with less, an outline is round."""
DENTED = 0.55
"""Smallest radius by largest: a diamond has 0.71, a cross 0.44."""
SMALL, BIG = 0.203, 0.293
"""Of the picture's side: the largest radius of a figure that is small, or big."""
ASIDE = 0.055
"""Of the side: a figure so far from the middle is at a side."""
CLEAN = 0.06
"""Mean distance of the pixels from a mixture of the two colours, of the whole range."""


@dataclass(frozen=True)
class Seen:
    colour: str
    shape: str
    background: str
    size: str | None
    place: str | None
    clean: bool
    """Two colours and one figure, and nothing else."""


def look(picture: NDArray[Any], colours: Mapping[str, tuple[int, int, int]]) -> Seen | None:
    """None if there is no figure."""
    pixels = np.asarray(picture, dtype=np.float64)
    side = pixels.shape[0]
    frame = np.concatenate((pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))
    back = np.median(frame, axis=0)
    away = np.linalg.norm(pixels - back, axis=2)
    if away.max() < 40:
        return None
    front = np.median(pixels[away > 0.7 * np.quantile(away, 0.995)], axis=0)
    line = front - back
    share = ((pixels - back) @ line / (line @ line)).clip(0, 1)
    left_over = np.linalg.norm(pixels - back - share[..., None] * line, axis=2).mean() / 255
    rows, columns = np.mgrid[0:side, 0:side]
    figure = np.where(share > 0.15, share, 0)
    y, x = (float((axis * figure).sum() / figure.sum()) for axis in (rows, columns))
    radii, hollow = _outline(figure, y, x)
    middle = (side - 1) / 2
    inside = np.hypot(rows - y, columns - x) < radii.max() + 2
    return Seen(
        _nearest(front, colours),
        "ring" if hollow else _shape(radii),
        _nearest(back, colours),
        _size(radii.max() / side),
        _place((x - middle) / side, (y - middle) / side),
        bool(left_over < CLEAN and figure[~inside].sum() < 0.02 * figure.sum() + 1),
    )


def _outline(figure: NDArray[np.float64], y: float, x: float) -> tuple[NDArray[np.float64], bool]:
    """The radius in each direction, and whether the figure has a hole in its middle."""
    angles = np.arange(DIRECTIONS) * 2 * np.pi / DIRECTIONS
    steps = np.arange(0.125, figure.shape[0] * 0.75, 0.25)
    rays = _sample(
        figure, y + steps[None, :] * np.sin(angles)[:, None], x + steps[None, :] * np.cos(angles)[:, None]
    )
    hollow = bool(rays[:, steps < 2].mean() < 0.5)
    if hollow:  # filled, for its radius
        rays = np.maximum.accumulate(rays[:, ::-1], axis=1)[:, ::-1]
    return rays.sum(axis=1) * 0.25, hollow


def _sample(
    values: NDArray[np.float64], y: NDArray[np.float64], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Between pixels; nothing outside."""
    padded = np.pad(values, 1)
    y, x = ((axis + 1).clip(0, padded.shape[0] - 1.001) for axis in (y, x))
    top, left = y.astype(int), x.astype(int)
    down, right = y - top, x - left
    mixed: NDArray[np.float64] = (
        padded[top, left] * (1 - down) * (1 - right)
        + padded[top + 1, left] * down * (1 - right)
        + padded[top, left + 1] * (1 - down) * right
        + padded[top + 1, left + 1] * down * right
    )
    return mixed


def _shape(radii: NDArray[np.float64]) -> str:
    waves = np.fft.rfft(radii) / radii.sum() * 2
    strength = {count: abs(waves[count]) for count in (3, 4, 5)}
    count = max(strength, key=lambda one: strength[one])
    if strength[count] < WAVE:
        return "circle"
    if count != 4:
        return {3: "triangle", 5: "star"}[count]
    if waves[4].real < 0:  # corners between the axes
        return "square"
    return "cross" if radii.min() < DENTED * radii.max() else "diamond"


def _size(radius: float) -> str | None:
    return "small" if radius < SMALL else "big" if radius > BIG else None


def _place(x: float, y: float) -> str | None:
    if max(abs(x), abs(y)) < ASIDE:
        return None
    if abs(x) > abs(y):
        return "left" if x < 0 else "right"
    return "top" if y < 0 else "bottom"


def _nearest(colour: NDArray[np.float64], colours: Mapping[str, tuple[int, int, int]]) -> str:
    return min(colours, key=lambda name: float(np.linalg.norm(colour - colours[name])))
