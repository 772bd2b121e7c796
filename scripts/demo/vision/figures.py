"""What a picture shows: figures on a background, in coordinates from 0 to 1 with y downwards.

Where a figure is, is never in doubt: its centre keeps away from the lines between the nine fields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from demo.generator.base import Source

Rgb = tuple[int, int, int]
Point = tuple[float, float]

COLOURS: dict[str, Rgb] = {
    "red": (215, 38, 38),
    "orange": (245, 138, 28),
    "yellow": (240, 212, 40),
    "green": (44, 158, 66),
    "blue": (40, 88, 214),
    "purple": (126, 56, 172),
    "pink": (244, 132, 186),
    "black": (26, 26, 28),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
UNSEEN = (("purple", "star"), ("green", "diamond"), ("orange", "cross"), ("pink", "triangle"))
"""Pairs that no training picture has."""
FIELDS = (
    ("top left", "top", "top right"),
    ("left", "centre", "right"),
    ("bottom left", "bottom", "bottom right"),
)
MOST = 6
"""Figures in a picture."""
TINT, SHADE = 14, 10
"""How far a colour may be off, and the three channels of a background from each other."""
SMALLEST, LARGEST, LARGEST_ALONE = 0.078, 0.14, 0.2
"""The radius of the circle around a figure."""
GAP, EDGE, CLEAR = 0.02, 0.01, 0.04
"""Between figures, from the picture's edge, from the lines between fields."""


@dataclass(frozen=True)
class Figure:
    shape: str
    colour: str
    x: float
    y: float
    radius: float
    turn: float = 0.0
    """Radians, clockwise."""
    tint: Rgb = (0, 0, 0)
    """The colour as it is drawn."""
    outline: float = 0.0
    """Width of a darker edge."""

    @property
    def field(self) -> str:
        return FIELDS[min(2, int(self.y * 3))][min(2, int(self.x * 3))]


@dataclass(frozen=True)
class Scene:
    figures: tuple[Figure, ...]
    background: Rgb = (255, 255, 255)


def draw_scene(source: Source, count: int | None = None, *, unseen: bool = False) -> Scene:
    """A scene of random figures; with `unseen` one of the pairs that training never shows is among them."""
    if count is None:
        count = source.random.choices(range(MOST + 1), (4, 24, 20, 17, 14, 11, 10))[0]
    colours, shapes = _palette(source, tuple(COLOURS)), _palette(source, SHAPES)
    pairs = [(c, s) for c in colours for s in shapes if (c, s) not in UNSEEN] or [("red", "circle")]
    wanted = [source.one_of(pairs) for _ in range(count)]
    if unseen and count:
        wanted[0] = source.one_of(UNSEEN)
    figures: list[Figure] = []
    while len(figures) < count:
        figure = _place(source, figures, wanted[len(figures)], alone=count == 1)
        if figure is None:  # no room: begin again
            figures = []
        else:
            figures.append(figure)
    # Not in the order of placing: the first ones had more room.
    source.random.shuffle(figures)
    return Scene(tuple(figures), _background(source, any(one.colour == "black" for one in figures)))


def corners(shape: str) -> list[Point]:
    """Of a figure of radius 1 that is not turned; a circle has none."""
    if shape == "circle":
        return []
    if shape == "square":
        return _ring(4, -45)
    if shape == "diamond":
        return _ring(4, 0)
    if shape == "triangle":
        return _ring(3, -90)
    if shape == "star":
        outer, inner = _ring(5, -90), _ring(5, -54)
        return [p for o, (x, y) in zip(outer, inner, strict=True) for p in (o, (0.42 * x, 0.42 * y))]
    w, e = 0.3, 0.95
    return [(-w, -e), (w, -e), (w, -w), (e, -w), (e, w), (w, w), (w, e), (-w, e), (-w, w), (-e, w), (-e, -w),
            (-w, -w)]  # fmt: skip


def _ring(count: int, first: float) -> list[Point]:
    angles = [math.radians(first + 360 * index / count) for index in range(count)]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def _palette(source: Source, all_of_them: tuple[str, ...]) -> tuple[str, ...]:
    """Often only few, so that there is something to count."""
    if source.chance(0.5):
        return all_of_them
    return tuple(source.random.sample(all_of_them, source.number(1, 3)))


def _place(source: Source, others: list[Figure], pair: tuple[str, str], *, alone: bool) -> Figure | None:
    colour, shape = pair
    for _ in range(30):
        radius = source.random.uniform(SMALLEST, LARGEST_ALONE if alone else LARGEST)
        x, y = (_along(source, source.number(0, 2), radius) for _ in range(2))
        if all(math.hypot(x - o.x, y - o.y) >= radius + o.radius + GAP for o in others):
            break
    else:
        return None
    turn = source.random.uniform(-math.pi, math.pi) if shape == "star" else source.random.uniform(-0.15, 0.15)
    return Figure(
        shape,
        colour,
        round(x, 4),
        round(y, 4),
        round(radius, 4),
        round(turn, 3),
        _near(source, COLOURS[colour], TINT),
        round(source.random.uniform(0.01, 0.02), 4) if source.chance(0.3) else 0.0,
    )


def _along(source: Source, third: int, radius: float) -> float:
    low = max(third / 3 + (CLEAR if third else 0), radius + EDGE)
    high = min((third + 1) / 3 - (CLEAR if third < 2 else 0), 1 - radius - EDGE)
    return source.random.uniform(low, high)


def _background(source: Source, has_black: bool) -> Rgb:
    if source.chance(0.2) and not has_black:
        level = source.number(30, 60)
    else:
        level = 255 if source.chance(0.3) else source.number(205, 250)
    return _near(source, (level, level, level), SHADE)


def _near(source: Source, colour: Rgb, by: int) -> Rgb:
    r, g, b = (min(255, max(0, value + source.number(-by, by))) for value in colour)
    return r, g, b
