"""What is drawn, and prompts that ask for it, in English and Chinese.

Held-out prompts have a wording that is never trained on and a figure (colour, shape and background together)
that is never trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from demo.generator.base import Pool, Source

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (250, 220, 40),
    "green": (35, 160, 60),
    "blue": (35, 80, 220),
    "purple": (125, 45, 170),
    "pink": (250, 150, 200),
    "brown": (125, 75, 35),
    "white": (252, 252, 252),
    "black": (8, 8, 8),
    "grey": (150, 150, 150),
}
FIGURE_COLOURS = tuple(name for name in COLOURS if name != "grey")
BACKGROUNDS = ("white", "black", "grey", "blue", "yellow")
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring")
SIZES = ("small", "big")
PLACES = ("left", "right", "top", "bottom")

NAMES = {
    "circle": ("circle", "circle", "disc", "dot"),
    "square": ("square", "square", "box"),
    "triangle": ("triangle",),
    "diamond": ("diamond", "diamond", "rhombus"),
    "star": ("star", "star", "five-pointed star"),
    "cross": ("cross", "cross", "plus sign"),
    "ring": ("ring", "ring", "donut"),
    "small": ("small", "tiny", "little"),
    "big": ("big", "large", "huge"),
    "grey": ("grey", "gray"),
    "purple": ("purple", "purple", "violet"),
}
CHINESE = {
    "red": ("红色", "红"),
    "orange": ("橙色",),
    "yellow": ("黄色", "黄"),
    "green": ("绿色", "绿"),
    "blue": ("蓝色", "蓝"),
    "purple": ("紫色",),
    "pink": ("粉色", "粉红色"),
    "brown": ("棕色",),
    "white": ("白色", "白"),
    "black": ("黑色", "黑"),
    "grey": ("灰色",),
    "circle": ("圆形", "圆"),
    "square": ("正方形", "方块"),
    "triangle": ("三角形",),
    "diamond": ("菱形",),
    "star": ("五角星", "星星"),
    "cross": ("十字", "十字形"),
    "ring": ("圆环",),
    "small": ("小", "小小的"),
    "big": ("大", "大大的"),
    "left": ("左边", "左侧"),
    "right": ("右边", "右侧"),
    "top": ("上面", "上方"),
    "bottom": ("下面", "下方"),
}

# {figure} brings its article; {ground} and {place} bring their preposition and may be empty.
WORDINGS = Pool(
    train=(
        "{figure} {ground} {place}",
        "{figure} {place} {ground}",
        "{figure} {ground} {place}.",
        "draw {figure} {ground} {place}",
        "draw {figure} {place} {ground}",
        "Draw me {figure} {ground} {place}, please",
        "please draw {figure} {place} {ground}",
        "paint {figure} {ground} {place}",
        "paint {figure} {place}, {ground}",
        "a picture of {figure} {ground} {place}",
        "an image of {figure} {place} {ground}",
        "a drawing of {figure} {ground} {place}",
        "show {figure} {ground} {place}",
        "show me {figure} {place} {ground}",
        "I want {figure} {ground} {place}",
        "make {figure} {ground} {place}",
        "can you draw {figure} {ground} {place}?",
        "generate a picture with {figure} {place} {ground}",
        "{ground}, {figure} {place}",
        "simple drawing: {figure} {ground} {place}",
        "one picture, {figure} {ground} {place}, nothing else",
    ),
    held_out=(
        "please paint {figure} {ground} {place}",
        "could you draw {figure} {place} {ground}?",
        "I would like to see {figure} {ground} {place}",
        "make me a simple image with {figure} {place} {ground}",
        "Generate an image of {figure} {ground} {place}, please.",
        "a nice little sketch: {figure} {ground} {place}",
        "we need {figure} {ground} {place}",
        "{figure} {place}, {ground}, plain drawing",
    ),
)
FIGURES = Pool(
    train=(
        "a {size} {colour} {shape}",
        "a {size} {colour} {shape}",
        "a {size} {colour} {shape}",
        "one {size} {colour} {shape}",
        "{size} {colour} {shape}",
        "a {colour} {size} {shape}",
        "the {size} {colour} {shape}",
        "a {size} {shape} in {colour}",
    ),
    held_out=(
        "a {size} {colour} {shape}",
        "just one {size} {colour} {shape}",
        "a single {size} {colour} {shape}",
    ),
)
GROUNDS = Pool(
    train=(
        "on {colour}",
        "on a {colour} background",
        "on {colour} background",
        "with a {colour} background",
        "on {colour} paper",
        "{colour} background",
    ),
    held_out=("on a plain {colour} background", "over a {colour} background", "on a {colour} sheet of paper"),
)
SIDES = Pool(
    train=("on the {side}", "at the {side}", "on the {side} side", "near the {side} edge"),
    held_out=("to the {side}", "at the {side} side", "close to the {side} edge"),
)
MIDDLES = Pool(
    train=("in the middle", "in the center", "in the centre"),
    held_out=("right in the middle", "at the center"),
)
CHINESE_WORDINGS = Pool(
    train=(
        "{ground}{place}{figure}",
        "画{figure}{comma_ground}{comma_place}",
        "请画{figure}{comma_ground}{comma_place}",
        "一张图：{figure}{comma_ground}{comma_place}",
        "{comma_ground}{comma_place}，{figure}",
    ),
    held_out=("请给我画{figure}{comma_ground}{comma_place}", "我想要{figure}{comma_ground}{comma_place}。"),
)
CHINESE_SHARE = 0.2
EMPTY_SHARE = 0.01
"""Of the training prompts; so that nothing asked still draws something."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Scene:
    """One figure. What a prompt leaves open is None: the size is then middling, the place the middle."""

    colour: str
    shape: str
    background: str = "white"
    size: str | None = None
    place: str | None = None

    @property
    def key(self) -> str:
        return f"{self.colour} {self.shape} {self.background}"


@dataclass(frozen=True)
class Prompt:
    text: str
    scene: Scene


def train_prompt(seed: int, index: int) -> Prompt:
    return _make(Source("train", random.Random(f"image {seed} {index}")))


def held_out(seed: int, count: int) -> Iterator[Prompt]:
    for index in range(count):
        yield _make(Source("held-out", random.Random(f"image held-out {seed} {index}")))


def scene(source: Source) -> Scene:
    while True:
        background = source.one_of(BACKGROUNDS)
        colour = source.one_of([name for name in FIGURE_COLOURS if name != background])
        drawn = Scene(
            colour,
            source.one_of(SHAPES),
            background,
            source.one_of((None, None, *SIZES)),
            source.one_of((None, None, None, *PLACES)),
        )
        if source.owns(drawn.key):
            return drawn


def _make(source: Source) -> Prompt:
    drawn = scene(source)
    if source.split == "train" and source.chance(EMPTY_SHARE):
        return Prompt("", drawn)
    return Prompt((_chinese if source.chance(CHINESE_SHARE) else _english)(source, drawn), drawn)


def _english(source: Source, drawn: Scene) -> str:
    def word(name: str | None) -> str:
        return source.one_of(NAMES.get(name, (name,))) if name else ""

    figure = source.pick(FIGURES).format(
        size=word(drawn.size), colour=word(drawn.colour), shape=word(drawn.shape)
    )
    if drawn.place:
        place = source.pick(SIDES).format(side=drawn.place)
    else:
        place = source.pick(MIDDLES) if source.chance(0.2) else ""
    # White is what paper is: it may stay unsaid.
    unsaid = drawn.background == "white" and source.chance(0.3)
    ground = "" if unsaid else source.pick(GROUNDS).format(colour=word(drawn.background))
    text = source.pick(WORDINGS).format(figure=figure, ground=ground, place=place)
    if source.split == "train" and source.chance(0.25):
        text = _with_noise(source, text)
    return _tidy(text)


def _chinese(source: Source, drawn: Scene) -> str:
    def word(name: str | None) -> str:
        return source.one_of(CHINESE[name]) if name else ""

    unsaid = drawn.background == "white" and source.chance(0.3)
    colour = word(drawn.background)
    figure = (
        f"一个{word(drawn.size)}{word(drawn.colour)}{'' if source.chance(0.5) else '的'}{word(drawn.shape)}"
    )
    place = word(drawn.place)
    wording: str = source.pick(CHINESE_WORDINGS)
    return wording.format(
        figure=figure.replace("的的", "的"),
        ground="" if unsaid else f"{colour}背景上",
        comma_ground="" if unsaid else f"，{colour}背景",
        place=f"{place}有" if place else "",
        comma_place=f"，在{place}" if place else "",
    ).lstrip("，")


def _with_noise(source: Source, text: str) -> str:
    """A made-up word at either end: what the model does not know must not disturb it."""
    made_up = "".join(source.one_of(LETTERS) for _ in range(source.number(2, 8)))
    return f"{made_up} {text}" if source.chance(0.6) else f"{text} {made_up}"


def _tidy(text: str) -> str:
    words = text.split()
    for index, (one, after) in enumerate(zip(words, words[1:], strict=False)):
        if one == "a" and after[0] in "aeiou":
            words[index] = "an"
    return " ".join(words).replace(" ,", ",").replace(" .", ".").replace(" ?", "?").lstrip(", ")
