"""Paints many scenes at once in torch, on the device that trains: each time with other noise and tints.

Each shape is a table of distances to its edge, looked up for every point of a picture.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from demo.vision.drawing import DARKER
from demo.vision.figures import SHAPES, corners

SIDE, REACH = 256, 1.5
"""Points of a table along one side, and how far from the centre it goes."""


def paint(figures: Tensor, background: Tensor, size: int, *, varied: bool = True) -> Tensor:
    """Pictures of `rows.Scenes` as bytes [N, size, size, 3].

    `varied` adds what differs from one time to the next: noise, tints, soft edges, a shift by half a pixel.
    """
    count, device = len(figures), figures.device
    shape, _, x, y, radius, turn, *tint, outline = figures.unbind(-1)
    colour = torch.stack(tint, -1)
    soft = torch.ones(count, 1, 1, 1, device=device)
    if varied:
        soft = soft + torch.rand(count, 1, 1, 1, device=device) * 0.6
        shift = (torch.rand(2, count, 1, device=device) - 0.5) / size
        x, y = x + shift[0], y + shift[1]
        colour = colour + torch.randn_like(colour) * 3
    points = (torch.arange(size, device=device) + 0.5) / size
    dx = points[None, None, None, :] - x[..., None, None]
    dy = points[None, None, :, None] - y[..., None, None]
    cos, sin = torch.cos(turn)[..., None, None], torch.sin(turn)[..., None, None]
    scale = SIDE / (2 * REACH) / radius[..., None, None]
    u = ((dx * cos + dy * sin) * scale + SIDE / 2).long().clamp(0, SIDE - 1)
    v = ((dy * cos - dx * sin) * scale + SIDE / 2).long().clamp(0, SIDE - 1)
    table = _distances(device)
    here = shape.clamp(min=0).long()[..., None, None]
    # To the edge, in pixels; positive inside.
    depth = table[(here * SIDE + v) * SIDE + u] * (radius * size)[..., None, None]
    covered = (0.5 + depth / soft).clamp(0, 1) * (shape >= 0)[..., None, None]
    filled = (0.5 + (depth - (outline * size)[..., None, None]) / soft).clamp(0, 1)
    picture = background[:, None, None, :].float().expand(count, size, size, 3)
    for at in range(figures.shape[1]):  # they do not overlap, but one after the other needs less memory
        shade = DARKER + (1 - DARKER) * filled[:, at, ..., None]
        cover = covered[:, at, ..., None]
        picture = picture * (1 - cover) + colour[:, at, None, None, :] * shade * cover
    if varied:
        picture = picture + torch.randn_like(picture) * torch.rand(count, 1, 1, 1, device=device) * 6
    return picture.round().clamp(0, 255).to(torch.uint8)


def centres(figures: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shape, colour and field of the figure whose centre a patch has, counted from 1; [N, side * side]."""
    count = len(figures)
    shape, colour = figures[..., 0], figures[..., 1]
    column, row = ((figures[..., at] * side).long().clamp(0, side - 1) for at in (2, 3))
    there = shape >= 0
    # One place more, for figures that are not there.
    place = torch.where(there, row * side + column, side * side)
    right, down = ((figures[..., at] * 3).long().clamp(0, 2) for at in (2, 3))
    nothing = torch.zeros(count, side * side + 1, dtype=torch.long, device=figures.device)
    shapes, colours, fields = (
        nothing.scatter(1, place, (kind + 1).long())[:, :-1] for kind in (shape, colour, down * 3 + right)
    )
    return shapes, colours, fields


@functools.cache
def _distances(device: torch.device) -> Tensor:
    """Of the points of each shape's table to its edge, positive inside; flat."""
    line = (torch.arange(SIDE) + 0.5) / SIDE * 2 * REACH - REACH
    y, x = torch.meshgrid(line, line, indexing="ij")
    tables = []
    for shape in SHAPES:
        points = corners(shape)
        tables.append(_to_polygon(x, y, points) if points else 1 - torch.hypot(x, y))
    return torch.stack(tables).flatten().to(device)


def _to_polygon(x: Tensor, y: Tensor, points: list[tuple[float, float]]) -> Tensor:
    nearest = torch.full_like(x, math.inf)
    inside = torch.zeros_like(x, dtype=torch.bool)
    for (ax, ay), (bx, by) in zip(points, [*points[1:], points[0]], strict=True):
        ex, ey = bx - ax, by - ay
        along = (((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey)).clamp(0, 1)
        nearest = torch.minimum(nearest, torch.hypot(x - ax - along * ex, y - ay - along * ey))
        if ey:
            crosses = ((ay > y) != (by > y)) & (x < ax + (y - ay) / ey * ex)
            inside = inside ^ crosses
    return torch.where(inside, nearest, -nearest)
