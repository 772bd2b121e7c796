"""Names, cities and other words; most are made up, so that a model learns to copy and not to know."""

from __future__ import annotations

from demo.generator.base import Pool, Source

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
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "h",
    "j",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_ENDS = ("", "", "n", "l", "r", "s", "t", "m", "nd", "rk", "ck", "th", "ston", "ville", "burg")


def made_up(source: Source) -> str:
    """A word nobody knows, of the source's split."""
    while True:
        syllables = source.number(1, 3)
        word = "".join(source.one_of(_STARTS) + source.one_of(_VOWELS) for _ in range(syllables))
        word += source.one_of(_ENDS)
        if len(word) > 2 and source.owns(word):
            return word


def name(source: Source) -> str:
    return made_up(source).capitalize() if source.chance(0.6) else source.pick(NAMES)


def city(source: Source) -> str:
    if source.chance(0.4) or (source.split == "held-out" and source.chance(0.5)):
        return source.pick(CITIES)
    if source.chance(0.2):
        return f"{source.one_of(('New', 'San', 'Port', 'Saint'))} {made_up(source).capitalize()}"
    return made_up(source).capitalize()


def word(source: Source) -> str:
    return made_up(source) if source.chance(0.4) else source.pick(WORDS)


def loosely(source: Source, text: str) -> str:
    """As people type: sometimes without capital or full stop."""
    if source.chance(0.2):
        text = text[0].lower() + text[1:]
    if source.chance(0.2):
        text = text.rstrip(ENDS)
    return text


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)
