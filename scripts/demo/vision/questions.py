"""Questions about scenes and their answers, in English and Chinese; wordings belong to a split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from demo.generator.base import Pool, Source
from demo.generator.words import loosely
from demo.vision.figures import COLOURS, FIELDS, SHAPES, Figure, Scene

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
NUMBERS_ZH = "零一两三四五六"
NOUNS = ("figure", "shape", "object")
COLOURS_ZH = {
    "red": "红色", "orange": "橙色", "yellow": "黄色", "green": "绿色", "blue": "蓝色", "purple": "紫色",
    "pink": "粉色", "black": "黑色",
}  # fmt: skip
SHAPES_ZH = {
    "circle": "圆形", "square": "正方形", "triangle": "三角形", "star": "星形", "diamond": "菱形",
    "cross": "十字形",
}  # fmt: skip
PLACES_ZH = {
    "top left": "左上", "top": "上方", "top right": "右上", "left": "左边", "centre": "中间", "right": "右边",
    "bottom left": "左下", "bottom": "下方", "bottom right": "右下",
}  # fmt: skip
PLACES = {
    "top left": "at the top left", "top": "at the top", "top right": "at the top right",
    "left": "on the left", "centre": "in the centre", "right": "on the right",
    "bottom left": "at the bottom left", "bottom": "at the bottom", "bottom right": "at the bottom right",
}  # fmt: skip
SIDES = {"left of": "在{b}的左边", "right of": "在{b}的右边", "above": "在{b}的上面", "below": "在{b}的下面"}

COLOUR = Pool(
    (
        "What colour is {it}?", "Which colour is {it}?", "What is the colour of {it}?",
        "Which colour does {it} have?", "Tell me the colour of {it}.", "Name the colour of {it}.",
        "{It} is of which colour?", "What colour does {it} have?", "The colour of {it}?",
        "Please tell me what colour {it} is.", "Say the colour of {it}.",
    ),
    ("Please name the colour of {it}.", "Tell me which colour {it} is.", "Which is the colour of {it}?",
     "{It} has which colour?"),
)  # fmt: skip
COLOUR_ZH = Pool(
    ("{it}是什么颜色?", "{it}是什么颜色的?", "请问{it}是什么颜色?", "{it}的颜色是什么?", "说出{it}的颜色。",
     "告诉我{it}的颜色。"),
    ("请说出{it}的颜色。", "请告诉我{it}是什么颜色?"),
)  # fmt: skip
SHAPE = Pool(
    (
        "What shape is {it}?", "Which shape is {it}?", "What is the shape of {it}?",
        "Which shape does {it} have?", "Tell me the shape of {it}.", "Name the shape of {it}.",
        "{It} is of which shape?", "What shape does {it} have?", "The shape of {it}?",
        "Please tell me what shape {it} is.", "Say the shape of {it}.",
    ),
    ("Please name the shape of {it}.", "Tell me which shape {it} is.", "Which is the shape of {it}?",
     "{It} has which shape?"),
)  # fmt: skip
SHAPE_ZH = Pool(
    ("{it}是什么形状?", "{it}是什么形状的?", "请问{it}是什么形状?", "{it}的形状是什么?", "说出{it}的形状。",
     "告诉我{it}的形状。"),
    ("请说出{it}的形状。", "请告诉我{it}是什么形状?"),
)  # fmt: skip
COUNT = Pool(
    (
        "How many {them} are there?", "How many {them} do you see?", "Count the {them}.",
        "How many {them} are in the picture?", "How many {them} can you see?", "How many {them}?",
        "What is the number of {them}?", "Tell me how many {them} there are.", "Please count the {them}.",
        "How many {them} does the picture have?", "Count all {them} in the picture.",
    ),
    ("Please tell me how many {them} you see.", "Count the {them} in the picture.",
     "How many {them} are there in the picture?", "Please count all {them}."),
)  # fmt: skip
COUNT_ZH = Pool(
    ("有几个{them}?", "有多少个{them}?", "图中有几个{them}?", "图片里有多少个{them}?", "数一数{them}。",
     "请数一数{them}。", "你看到几个{them}?"),
    ("请问有几个{them}?", "图中有多少个{them}?"),
)  # fmt: skip
POSITION = Pool(
    (
        "Where is {it}?", "Where in the picture is {it}?", "Where do you see {it}?",
        "Where can you see {it}?", "Tell me where {it} is.", "What is the position of {it}?",
        "In which part of the picture is {it}?", "Say where {it} is.", "{It} is where?",
        "Please tell me where {it} is.", "Which position does {it} have?",
    ),
    ("Please say where {it} is.", "Tell me the position of {it}.", "Where is {it} in the picture?",
     "In the picture, where is {it}?"),
)  # fmt: skip
POSITION_ZH = Pool(
    ("{it}在哪里?", "{it}在哪儿?", "请问{it}在哪里?", "{it}在图片的什么位置?", "{it}的位置在哪里?",
     "告诉我{it}在哪里。"),
    ("请告诉我{it}在哪里?", "{it}在图中的什么位置?"),
)  # fmt: skip
RELATION = Pool(
    ("Is {a} {side} {b}?", "Would you say that {a} is {side} {b}?", "Is it true that {a} is {side} {b}?",
     "{A} is {side} {b}, right?", "Tell me: is {a} {side} {b}?", "Do you see {a} {side} {b}?"),
    ("Please tell me: is {a} {side} {b}?", "Is it right that {a} is {side} {b}?"),
)  # fmt: skip
RELATION_ZH = Pool(
    ("{a}{side}吗?", "请问{a}{side}吗?", "{a}是不是{side}?"),
    ("请告诉我{a}{side}吗?", "请问{a}是不是{side}?"),
)
EXISTS = Pool(
    ("Is there {one}?", "Do you see {one}?", "Is there {one} in the picture?", "Can you see {one}?",
     "Does the picture have {one}?", "Tell me: is there {one}?"),
    ("Do you see {one} in the picture?", "Please tell me: is there {one}?"),
)  # fmt: skip
EXISTS_ZH = Pool(
    ("有{one}吗?", "图中有{one}吗?", "有没有{one}?", "你看到{one}了吗?"),
    ("图中有没有{one}?", "请问有{one}吗?"),
)
DESCRIBE = Pool(
    (
        "What is this?", "What do you see?", "What is in the picture?", "Describe the picture.",
        "What does the picture show?", "What can you see?", "Tell me what you see.", "What is here?",
        "Describe what you see.", "What is shown here?",
    ),
    ("Tell me what is in the picture.", "What can you see in the picture?", "What is shown in the picture?",
     "Please describe the picture."),
)  # fmt: skip
DESCRIBE_ZH = Pool(
    ("这是什么?", "你看到什么?", "图中有什么?", "描述一下图片。", "图片里是什么?"),
    ("图片里有什么?", "请描述一下图片。"),
)
SENTENCE = Pool(
    (" Answer in a sentence.", " Answer with a sentence.", " Use a full sentence.", " Reply in one sentence.",
     " In a full sentence, please."),
    (" Answer in one sentence.", " Reply with a full sentence."),
)  # fmt: skip
SENTENCE_ZH = Pool(
    ("用一句话回答。", "请用完整的句子回答。", "请用一句话回答。"),
    ("用完整的句子回答。", "请用一句完整的话回答。"),
)
WHICH = Pool(
    ("In the {nth} picture: {asked}", "Look at the {nth} picture. {asked}", "{nth} picture: {asked}",
     "About the {nth} picture: {asked}", "{asked} I mean the {nth} picture."),
    ("Look at the {nth} picture: {asked}", "About the {nth} picture. {asked}"),
)  # fmt: skip
NTH = ("first", "second")


@dataclass(frozen=True)
class Asked:
    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class Way:
    """How an answer is wanted."""

    chinese: bool = False
    sentence: bool = False


Ask = Callable[[Source, Scene, Way], Asked | None]


def ask_about(source: Source, scene: Scene, kinds: dict[Ask, int], *, may_be_chinese: bool = True) -> Asked:
    """A question that the scene answers in one way only."""
    makers, weights = tuple(kinds), tuple(kinds.values())
    while True:
        way = Way(may_be_chinese and source.chance(0.2), source.chance(0.2))
        asked = source.random.choices(makers, weights)[0](source, scene, way)
        if asked is not None:
            return asked


def colour(source: Source, scene: Scene, way: Way) -> Asked | None:
    found = _pick(source, scene, ("shape", "place"))
    if found is None:
        return None
    one, by = found
    it = _named(source, one, by, way)
    value = COLOURS_ZH[one.colour] if way.chinese else one.colour
    full = f"{it}是{value}的。" if way.chinese else f"{_big(it)} is {value}."
    return _asked("colour", source, way, COLOUR, COLOUR_ZH, value, full, it=it, It=_big(it))


def shape(source: Source, scene: Scene, way: Way) -> Asked | None:
    found = _pick(source, scene, ("colour", "place"))
    if found is None:
        return None
    one, by = found
    it = _named(source, one, by, way, nouns=("figure", "object"))
    value = SHAPES_ZH[one.shape] if way.chinese else one.shape
    full = f"{it}是{value}。" if way.chinese else f"{_big(it)} is a {value}."
    return _asked("shape", source, way, SHAPE, SHAPE_ZH, value, full, it=it, It=_big(it))


def position(source: Source, scene: Scene, way: Way) -> Asked | None:
    found = _pick(source, scene, ("shape", "colour", "both"))
    if found is None:
        return None
    one, by = found
    it = _named(source, one, by, way)
    value = PLACES_ZH[one.field] if way.chinese else one.field
    full = f"{it}在{value}。" if way.chinese else f"{_big(it)} is {PLACES[one.field]}."
    return _asked("position", source, way, POSITION, POSITION_ZH, value, full, it=it, It=_big(it))


def count(source: Source, scene: Scene, way: Way) -> Asked | None:
    wanted_colour, wanted_shape, by = None, None, source.one_of(("all", "colour", "shape", "both"))
    # Mostly of what is there, sometimes of what is not.
    like = source.one_of(scene.figures) if scene.figures and source.chance(0.85) else None
    if by in ("colour", "both"):
        wanted_colour = like.colour if like else source.one_of(tuple(COLOURS))
    if by in ("shape", "both"):
        wanted_shape = like.shape if like else source.one_of(SHAPES)
    number = sum(
        wanted_colour in (None, one.colour) and wanted_shape in (None, one.shape) for one in scene.figures
    )
    if way.chinese:
        them = (COLOURS_ZH[wanted_colour] + "的" if wanted_colour else "") + SHAPES_ZH.get(
            wanted_shape or "", "图形"
        )
        value = f"{NUMBERS_ZH[number]}个"
        full = f"有{value}{them}。" if number else f"没有{them}。"
    else:
        noun = wanted_shape or source.one_of(NOUNS)
        name = f"{wanted_colour} {noun}" if wanted_colour else noun
        them, value = _several(name), NUMBERS[number]
        full = f"There are {value if number else 'no'} {them}." if number != 1 else f"There is one {name}."
    return _asked("count", source, way, COUNT, COUNT_ZH, value, full, them=them)


def relation(source: Source, scene: Scene, way: Way) -> Asked | None:
    if len(scene.figures) < 2:
        return None
    a, b = source.random.sample(scene.figures, 2)
    by_a, by_b = (
        _unique(scene, a, ("shape", "colour", "both")),
        _unique(scene, b, ("shape", "colour", "both")),
    )
    dx, dy = b.x - a.x, b.y - a.y
    far, near = max(abs(dx), abs(dy)), min(abs(dx), abs(dy))
    if not by_a or not by_b or far < 0.2 or far < 1.7 * near:
        return None
    truth = ("left of" if dx > 0 else "right of") if abs(dx) > abs(dy) else ("above" if dy > 0 else "below")
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}[truth]
    holds = source.chance(0.5)
    side = truth if holds else opposite
    name_a, name_b = (_named(source, one, source.one_of(by), way) for one, by in ((a, by_a), (b, by_b)))
    side = SIDES[side].format(b=name_b) if way.chinese else side
    return _yes_or_no(
        "relation", source, way, RELATION, RELATION_ZH, holds, a=name_a, A=_big(name_a), b=name_b, side=side
    )


def exists(source: Source, scene: Scene, way: Way) -> Asked | None:
    there = {(one.colour, one.shape) for one in scene.figures}
    if there and source.chance(0.5):
        pair = source.one_of(sorted(there))
    elif there and source.chance(0.5):  # nearly there
        pair = (source.one_of(sorted(there))[0], source.one_of(sorted(there))[1])
    else:
        pair = (source.one_of(tuple(COLOURS)), source.one_of(SHAPES))
    name = COLOURS_ZH[pair[0]] + "的" + SHAPES_ZH[pair[1]] if way.chinese else _one(f"{pair[0]} {pair[1]}")
    return _yes_or_no("exists", source, way, EXISTS, EXISTS_ZH, pair in there, one=name)


def describe(source: Source, scene: Scene, way: Way) -> Asked | None:
    """One figure, or two from left to right."""
    figures = sorted(scene.figures, key=lambda one: one.x)
    if len(figures) > 2 or (len(figures) == 2 and figures[1].x - figures[0].x < 0.1):
        return None
    if way.chinese:
        names = [f"一个{COLOURS_ZH[one.colour]}的{SHAPES_ZH[one.shape]}" for one in figures]
        value = "和".join(names) or "什么都没有"
        full = "和".join(f"{PLACES_ZH[o.field]}有{n}" for o, n in zip(figures, names, strict=True)) or value
        full += "。"
    else:
        names = [_one(f"{one.colour} {one.shape}") for one in figures]
        value = " and ".join(names) or "nothing"
        full = " and ".join(f"{n} {PLACES[o.field]}" for o, n in zip(figures, names, strict=True))
        full = f"There is {full or value}."
    return _asked("describe", source, way, DESCRIBE, DESCRIBE_ZH, value, full)


def _asked(
    kind: str, source: Source, way: Way, english: Pool, chinese: Pool, short: str, full: str, **slots: str
) -> Asked:
    question = source.pick(chinese if way.chinese else english).format(**slots)
    if way.sentence:
        question += source.pick(SENTENCE_ZH if way.chinese else SENTENCE)
    elif not way.chinese:
        question = loosely(source, question)
    if source.chance(0.25):
        question = question.replace("colour", "color").replace("centre", "center")
    return Asked(kind, question, full if way.sentence else short)


def _yes_or_no(
    kind: str, source: Source, way: Way, english: Pool, chinese: Pool, holds: bool, **slots: str
) -> Asked:
    if way.chinese:
        short, full = ("是", "是的。") if holds else ("不是", "不是。")
        if kind == "exists":
            short, full = ("有", "有的。") if holds else ("没有", "没有。")
    else:
        verb = ("it is", "it is not") if kind == "relation" else ("there is", "there is not")
        short, full = ("yes", f"Yes, {verb[0]}.") if holds else ("no", f"No, {verb[1]}.")
    return _asked(kind, source, way, english, chinese, short, full, **slots)


def _pick(source: Source, scene: Scene, ways: tuple[str, ...]) -> tuple[Figure, str] | None:
    """A figure, and by what it can be told from the others."""
    found = [(one, by) for one in scene.figures for by in _unique(scene, one, ways)]
    return source.one_of(found) if found else None


def _unique(scene: Scene, figure: Figure, ways: tuple[str, ...]) -> list[str]:
    if len(scene.figures) == 1:
        return ["alone", *ways]
    others = [one for one in scene.figures if one is not figure]
    same = {
        "shape": any(one.shape == figure.shape for one in others),
        "colour": any(one.colour == figure.colour for one in others),
        "both": any((one.shape, one.colour) == (figure.shape, figure.colour) for one in others),
        "place": any(one.field == figure.field for one in others),
    }
    return [way for way in ways if not same[way]]


def _named(source: Source, figure: Figure, by: str, way: Way, nouns: tuple[str, ...] = NOUNS) -> str:
    if way.chinese:
        return {
            "alone": "图形",
            "shape": SHAPES_ZH[figure.shape],
            "colour": f"{COLOURS_ZH[figure.colour]}的图形",
            "both": f"{COLOURS_ZH[figure.colour]}的{SHAPES_ZH[figure.shape]}",
            "place": f"{PLACES_ZH[figure.field]}的图形",
        }[by]
    noun = source.one_of(nouns)
    return {
        "alone": f"the {noun}",
        "shape": f"the {figure.shape}",
        "colour": f"the {figure.colour} {noun}",
        "both": f"the {figure.colour} {figure.shape}",
        "place": f"the {noun} {PLACES[figure.field]}",
    }[by]


def _big(text: str) -> str:
    return text[0].upper() + text[1:]


def _one(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _several(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


KINDS: dict[Ask, int] = {
    colour: 16,
    shape: 18,
    count: 30,
    position: 18,
    relation: 8,
    exists: 4,
    describe: 6,
}
"""How often each is asked in training."""
ATTRIBUTES: dict[str, Ask] = {"colour": colour, "shape": shape, "count": count, "position": position}
assert set(PLACES) == set(PLACES_ZH) == {field for row in FIELDS for field in row}
