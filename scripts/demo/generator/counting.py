"""Counting up and down, copying text, writing it in capitals, counting words."""

from __future__ import annotations

from demo.generator.base import Example, Pool, Source, reply, user
from demo.generator.facts import FACTS
from demo.generator.words import loosely, made_up_chinese, word

UP = Pool(
    (
        "Count from {a} to {b}.", "Please count from {a} to {b}.", "Count up from {a} to {b}.",
        "Count {a} to {b}.",
        "Can you count from {a} to {b}?", "List the numbers from {a} to {b}.", "从 {a} 数到 {b}。",
        "请从{a}数到{b}。",
    ),
    ("Can you count up from {a} to {b}?", "Please list the numbers from {a} to {b}.",
     "请你从 {a} 数到 {b}。"),
)  # fmt: skip
DOWN = Pool(
    (
        "Count down from {b} to {a}.", "Please count down from {b} to {a}.",
        "Count backwards from {b} to {a}.",
        "Can you count down from {b} to {a}?", "从 {b} 倒数到 {a}。",
    ),
    ("Please count backwards from {b} to {a}.", "Can you count backwards from {b} to {a}?",
     "请从 {b} 倒数到 {a}。"),
)  # fmt: skip
COPY = Pool(
    (
        "Repeat: {text}", "Say: {text}", "Repeat after me: {text}", "Copy this: {text}",
        "Please repeat: {text}",
        "Write exactly this: {text}", "Echo: {text}", 'Repeat "{text}".', 'Say "{text}".', "Copy: {text}",
        "Please copy: {text}", "Please say: {text}", "Please write this: {text}",
        "请重复:{text}", "跟我说:{text}",
    ),
    ("Please copy this: {text}", "Say after me: {text}", 'Please say "{text}".', "请跟我说:{text}"),
)  # fmt: skip
CAPITALS = Pool(
    (
        "Write in capital letters: {text}",
        "In capitals: {text}",
        "Shout: {text}",
        "Make this upper case: {text}",
        "Repeat in capital letters: {text}",
        "用大写写:{text}",
    ),
    ("Please write in capital letters: {text}", "Say in capitals: {text}", "请用大写写:{text}"),
)
TIMES = Pool(
    (
        "Say {text} {n} times.",
        "Repeat {text} {n} times.",
        "Write {text} {n} times.",
        "Please say {text} {n} times.",
    ),
    ("Please repeat {text} {n} times.", "Please write {text} {n} times."),
)
WORD_COUNT = Pool(
    (
        "How many words are in: {text}",
        "Count the words: {text}",
        "How many words: {text}",
        "Count the words in: {text}",
    ),
    ("Please count the words in: {text}", "How many words are there in: {text}"),
)


def make(source: Source) -> Example:
    return source.one_of((count, count, copy, copy, copy, capitals, times, words))(source)


def count(source: Source) -> Example:
    while True:
        a = source.number(0, 99)
        b = a + source.number(2, 14)
        if source.owns(f"count {a} {b}"):
            break
    numbers, wording = list(range(a, b + 1)), UP
    if source.chance(0.35):
        numbers, wording = numbers[::-1], DOWN
    asked = source.pick(wording).format(a=a, b=b)
    return _example("counting", loosely(source, asked), ", ".join(map(str, numbers)))


def copy(source: Source) -> Example:
    text = some_text(source)
    return _example("copying", source.pick(COPY).format(text=text), text)


def capitals(source: Source) -> Example:
    text = some_text(source) if source.chance(0.5) else _sentence(source)
    return _example("capitals", source.pick(CAPITALS).format(text=text), text.upper())


def times(source: Source) -> Example:
    text, n = word(source), source.number(2, 6)
    return _example("counting", source.pick(TIMES).format(text=text, n=n), " ".join([text] * n))


def words(source: Source) -> Example:
    """The trace numbers the words, the answer is the last number."""
    found = [word(source) for _ in range(source.number(2, 8))]
    thought = "\n".join(f"{index} {found[index - 1]}" for index in range(1, len(found) + 1))
    asked = source.pick(WORD_COUNT).format(text=" ".join(found))
    return Example("counting", (user(asked), reply(str(len(found)), thought)))


def _sentence(source: Source) -> str:
    return source.one_of(FACTS).answer


def some_text(source: Source) -> str:
    if source.chance(0.15):
        return "".join(str(source.number(0, 9)) for _ in range(source.number(3, 8)))
    if source.chance(0.15):
        return "".join(made_up_chinese(source) for _ in range(source.number(1, 4)))
    return " ".join(word(source) for _ in range(source.number(1, 7)))


def _example(skill: str, asked: str, answered: str) -> Example:
    return Example(skill, (user(asked), reply(answered)))
