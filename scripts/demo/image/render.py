"""Draws scenes: anti-aliased figures, many at once, on any device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from demo.image.scenes import COLOURS, PLACES, SHAPES, Scene

SIDE = 64
RADII = {None: 16.0, "small": 10.5, "big": 22.0}
"""Of the circle around the figure, in pixels."""
EDGE = 2.0
"""Pixels left free beside a figure at a side."""
LOOSE_TURN, LOOSE_SHIFT, LOOSE_RADIUS, LOOSE_COLOUR = math.radians(9), 2.0, 0.08, 0.05
NAMES = tuple(COLOURS)
SIZES = tuple(RADII)
DIRECTIONS = {None: (0, 0), "left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}


@dataclass(frozen=True)
class Scenes:
    """A column per trait, one row per scene, as numbers."""

    rows: torch.Tensor
    """Of colour, shape, background, size, place."""

    @classmethod
    def of(cls, scenes: Sequence[Scene]) -> Scenes:
        places = (None, *PLACES)
        return cls(
            torch.tensor(
                [
                    (
                        NAMES.index(one.colour),
                        SHAPES.index(one.shape),
                        NAMES.index(one.background),
                        SIZES.index(one.size),
                        places.index(one.place),
                    )
                    for one in scenes
                ],
                dtype=torch.long,
            )
        )


def as_bytes(pictures: torch.Tensor) -> NDArray[np.uint8]:
    """[n, height, width, 3], from pictures of -1 to 1."""
    scaled = ((pictures.float() / 2 + 0.5).clamp(0, 1) * 255).round()
    found: NDArray[np.uint8] = scaled.byte().permute(0, 2, 3, 1).cpu().numpy()
    return found


@dataclass(frozen=True)
class _Tables:
    palette: torch.Tensor
    radii: torch.Tensor
    directions: torch.Tensor
    corners: torch.Tensor


@functools.cache
def _tables(device: torch.device) -> _Tables:
    """What traits mean; copied to the device once, since a copy waits for all that it has to do."""
    return _Tables(
        torch.tensor(list(COLOURS.values()), device=device) / 127.5 - 1,
        torch.tensor(list(RADII.values()), device=device),
        torch.tensor(list(DIRECTIONS.values()), device=device),
        _corners().to(device),
    )


def draw(rows: torch.Tensor, looseness: torch.Tensor, side: int = SIDE) -> torch.Tensor:
    """Pictures [n, 3, side, side] from -1 to 1. Looseness, one number each: 0 draws all alike, 1 freely."""
    device, count = rows.device, len(rows)
    colour, shape, background, size, place = rows.unbind(1)
    tables = _tables(device)

    def loose(reach: float, *more: int) -> torch.Tensor:
        spread = torch.rand(count, *more, device=device) * 2 - 1
        return spread * reach * looseness.view(-1, *(1 for _ in more))

    radius = tables.radii[size] * (1 + loose(LOOSE_RADIUS))
    away = tables.directions[place]
    centre = away * (SIDE / 2 - EDGE - radius)[:, None] + loose(LOOSE_SHIFT, 2)
    # A figure is never cut: at a side it moves inwards only.
    room = (SIDE / 2 - 1 - radius)[:, None]
    centre = torch.maximum(torch.minimum(centre, room), -room)
    covered = _cover(shape, centre, radius, loose(LOOSE_TURN), side)[:, None]
    front, back = (
        (tables.palette[which] + 2 * loose(LOOSE_COLOUR, 3))[..., None, None]
        for which in (colour, background)
    )
    return (covered * front + (1 - covered) * back).clamp(-1, 1)


def _cover(
    shape: torch.Tensor, centre: torch.Tensor, radius: torch.Tensor, turn: torch.Tensor, side: int
) -> torch.Tensor:
    """How much of each pixel the figure covers, by its distance from the outline."""
    scale = SIDE / side
    line = (torch.arange(side, device=shape.device) + 0.5) * scale - SIDE / 2
    x = line[None, None, :] - centre[:, 0, None, None]
    y = line[None, :, None] - centre[:, 1, None, None]
    away = torch.sqrt(x * x + y * y)
    reach = radius[:, None, None]
    circle = away - reach
    ring = (away - 0.75 * reach).abs() - 0.25 * reach
    corners = _tables(shape.device).corners[shape] * reach
    sine, cosine = turn.sin()[:, None], turn.cos()[:, None]
    corners = torch.stack(
        (
            corners[..., 0] * cosine - corners[..., 1] * sine,
            corners[..., 0] * sine + corners[..., 1] * cosine,
        ),
        -1,
    )
    is_circle, is_ring = ((shape == SHAPES.index(name))[:, None, None] for name in ("circle", "ring"))
    distance = torch.where(is_circle, circle, torch.where(is_ring, ring, _polygon(x, y, corners)))
    return (0.5 - distance / scale).clamp(0, 1)


def _polygon(x: torch.Tensor, y: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
    """Distance from the outline, negative inside; edge by edge, inside by the even-odd rule."""
    nearest = torch.full_like(x + y, math.inf)
    inside = torch.zeros_like(nearest, dtype=torch.bool)
    for index in range(corners.shape[1]):
        x1, y1 = (corners[:, index, axis, None, None] for axis in (0, 1))
        x2, y2 = (corners[:, index - 1, axis, None, None] for axis in (0, 1))
        dx, dy = x2 - x1, y2 - y1
        along = (((x - x1) * dx + (y - y1) * dy) / (dx * dx + dy * dy).clamp(min=1e-9)).clamp(0, 1)
        nearest = torch.minimum(nearest, (x - x1 - along * dx) ** 2 + (y - y1 - along * dy) ** 2)
        crosses = (y1 > y) != (y2 > y)
        inside ^= crosses & (x - x1 < dx * (y - y1) / torch.where(dy == 0, 1e-9, dy))
    return torch.where(inside, -nearest.sqrt(), nearest.sqrt())


def _corners() -> torch.Tensor:
    """Of each shape, on a circle of radius 1; the last one again where a shape has fewer than others."""
    half, arm = math.sqrt(0.5), 0.32
    reach = math.sqrt(1 - arm * arm)

    def spokes(count: int, *radii: float) -> list[tuple[float, float]]:
        angles = (2 * math.pi * index / count - math.pi / 2 for index in range(count))
        return [
            (radii[index % len(radii)] * math.cos(angle), radii[index % len(radii)] * math.sin(angle))
            for index, angle in enumerate(angles)
        ]

    outlines = {
        "square": [(-half, -half), (half, -half), (half, half), (-half, half)],
        "triangle": spokes(3, 1.0),
        "diamond": spokes(4, 1.0),
        "star": spokes(10, 1.0, 0.42),
        "cross": [
            point
            for x, y in ((1, 0), (0, 1), (-1, 0), (0, -1))
            for point in (
                (x * reach + y * arm, y * reach - x * arm),
                (x * reach - y * arm, y * reach + x * arm),
                (x * arm - y * arm, y * arm + x * arm),
            )
        ],
    }
    longest = max(len(points) for points in outlines.values())
    rows = []
    for name in SHAPES:
        points = outlines.get(name, [(0.0, 0.0)])
        rows.append(points + [points[-1]] * (longest - len(points)))
    return torch.tensor(rows)
