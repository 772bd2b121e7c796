"""Names, cities and other words; most are made up, so that a model learns to copy and not to know."""

from __future__ import annotations

import re

from demo.generator.base import Pool, Source
from demo.generator.facts import FACTS

NAMES = Pool(
    (
        "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karin", "Leo",
        "Mia",
        "Noah", "Olga", "Paul", "Rosa", "Sven", "Tina", "Victor", "Wendy", "Yusuf", "Zoe", "Alice", "Bob",
        "Carol",
        "Dan", "Eve", "Frank", "Grace", "Henry", "Iris", "Jack", "Kate", "Liam", "Maria", "Nina", "Oscar",
        "Priya",
        "Quinn", "Ravi", "Sara", "Tom", "Uma", "Vera", "Will", "Xin", "Yuki", "Aisha", "Bruno", "小明",
        "小红",
        "李雷", "韩梅", "王芳", "张伟", "刘洋", "陈静",
    ),
    ("Marta", "Oliver", "Selma", "Theo", "Lina", "Arthur", "Nadia", "Simon", "Amara", "Kenji", "赵敏",
     "孙丽"),
)  # fmt: skip
CITIES = Pool(
    (
        "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Warsaw", "Dublin", "Athens",
        "Cairo",
        "Tokyo", "Osaka", "Seoul", "Delhi", "Mumbai", "Sydney", "Toronto", "Boston", "Chicago", "Denver",
        "Seattle",
        "Miami", "Lima", "Bogota", "Nairobi", "Lagos", "Accra", "Tunis", "Oslo", "Helsinki", "Bergen",
        "Hamburg",
        "Munich", "Cologne", "Geneva", "Zurich", "Milan", "Turin", "Naples", "Seville", "Porto", "Ghent",
        "Leeds",
        "New York", "San Diego", "Los Angeles", "Cape Town", "Hong Kong", "Buenos Aires", "Mexico City",
        "Tel Aviv",
        "Kuala Lumpur", "Rio de Janeiro", "北京", "上海", "广州", "成都", "杭州", "南京", "西安", "东京",
    ),
    (
        "Lisbon", "Stockholm", "Budapest", "Bonn", "Kyoto", "Hanoi", "Santiago", "Montreal", "Krakow",
        "Lyon",
        "Salzburg", "Brisbane", "San Jose", "Addis Ababa", "Quito", "Riga", "深圳", "武汉",
    ),
)  # fmt: skip
WORDS = Pool(
    (
        "apple", "river", "stone", "cloud", "green", "blue", "red", "window", "garden", "lamp", "tiger",
        "house",
        "bread", "music", "paper", "silver", "morning", "winter", "summer", "ocean", "forest", "light",
        "table",
        "chair", "horse", "train", "bridge", "candle", "mirror", "button", "yellow", "orange", "sun",
        "moon",
        "star", "rain", "wind", "fire", "salt", "sugar",
    ),
    ("pencil", "meadow", "copper", "rabbit", "engine", "violet", "harbour", "kettle", "lemon", "anchor"),
)  # fmt: skip
THINGS = Pool(
    ("apples", "books", "coins", "stamps", "eggs", "pens", "marbles", "tickets", "cards", "nails"),
    ("candles", "shells", "photos"),
)
ENDS = "?.!。"
COLOURS = ("red", "blue", "green", "black", "white", "yellow")

_STARTS = (
    "b", "bl", "br", "c", "ch", "cl", "cr", "d", "dr", "f", "fl", "fr", "g", "gl", "gr", "h", "j", "k", "kl",
    "kr", "l", "m", "n", "p", "pl", "pr", "qu", "r", "s", "sc", "sh", "sl", "sp", "st", "str", "t", "th",
    "tr", "v", "w", "x", "y", "z", "",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "y", "ai", "ea", "ee", "ia", "ie", "io", "oo", "ou")
_ENDS = (
    "", "", "", "n", "l", "r", "s", "t", "m", "d", "k", "x", "nd", "ng", "rk", "ck", "th", "ll", "tz", "ston",
    "ville", "burg", "stad", "grad", "ham", "ford", "er", "ing", "y",
)  # fmt: skip
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_COMMON = "天地人山水火土木金日月星云雨风花草树鸟鱼大小上下左右王李张刘陈杨黄吴周徐林何高马罗梁宋"
_HAN = range(0x4E00, 0x9FA6)


def made_up(source: Source) -> str:
    """A word nobody knows, of the source's split.

    Some sound like words, some are letters in any order, some are two known words cut and joined: whatever
    pieces an unknown word is cut into, each of them has been copied before.
    """
    while True:
        word = source.one_of((_syllables, _scrambled, _spliced))(source)
        if len(word) > 2 and source.owns(word) and word.capitalize() not in _LISTED:
            return word


def made_up_chinese(source: Source) -> str:
    """Two or three characters, common ones or any."""
    while True:
        word = "".join(
            source.one_of(_COMMON) if source.chance(0.5) else chr(source.one_of(_HAN))
            for _ in range(source.number(2, 3))
        )
        if source.owns(word) and word not in _LISTED:
            return word


def _syllables(source: Source) -> str:
    count = source.number(1, 3)
    sounds = "".join(source.one_of(_STARTS) + source.one_of(_VOWELS) for _ in range(count))
    return sounds + source.one_of(_ENDS)


def _scrambled(source: Source) -> str:
    return "".join(source.one_of(_LETTERS) for _ in range(source.number(2, 9)))


def _spliced(source: Source) -> str:
    first, second = source.one_of(PLAIN), source.one_of(PLAIN)
    return first[: source.number(1, 4)] + second[source.number(0, 3) :][:5].lower()


_LISTED = frozenset(
    word.capitalize() for pool in (NAMES, CITIES, WORDS) for word in (*pool.train, *pool.held_out)
)


PLAIN: tuple[str, ...] = tuple(
    sorted(
        {word for known in FACTS for word in re.findall("[A-Za-z]+", f"{known.answer} {known.asked}")}
        - _LISTED
        - {word.lower() for word in _LISTED}
    )
)
"""Words that mean something in another skill, to be copied like any other."""


def name(source: Source) -> str:
    if source.chance(0.1):
        return made_up_chinese(source)
    return made_up(source).capitalize() if source.chance(0.7) else source.pick(NAMES)


def city(source: Source) -> str:
    if source.chance(0.3) or (source.split == "held-out" and source.chance(0.5)):
        return source.pick(CITIES)
    if source.chance(0.1):
        return made_up_chinese(source)
    if source.chance(0.2):
        first = source.one_of(("New", "San", "Port", "Saint", "", "", ""))
        return f"{first or made_up(source).capitalize()} {made_up(source).capitalize()}"
    return made_up(source).capitalize()


def word(source: Source) -> str:
    """Small or large letters, or a word with a meaning elsewhere: copying asks not what it copies."""
    if source.chance(0.3):
        return source.pick(WORDS)
    if source.split == "train" and source.chance(0.3):
        return source.one_of(PLAIN)
    made = made_up(source)
    return source.one_of((made, made, made.capitalize(), made.upper()))


def loosely(source: Source, text: str) -> str:
    """As people type: sometimes without capital or full stop."""
    if source.chance(0.2):
        text = text[0].lower() + text[1:]
    if source.chance(0.2):
        text = text.rstrip(ENDS)
    return text


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)
