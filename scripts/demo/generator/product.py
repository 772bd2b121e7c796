"""Questions about this product, answered from its own documentation."""

from __future__ import annotations

import re

from demo.generator.base import Example, Pool, Source, reply, user
from demo.generator.facts import FACTS, Fact
from demo.generator.words import is_chinese, loosely

FRAMES = Pool(
    (
        "{q}?",
        "{q}?",
        "{q}?",
        "Please tell me: {q}?",
        "I have a question: {q}?",
        "Quick question, {q}?",
        "Hi, {q}?",
        "In dynamo-vllm, {q}?",
        "{q}, please?",
        "Question: {q}?",
        "I want to know: {q}?",
        "Hello! {q}?",
        "So {q}?",
        "{q} here?",
    ),
    ("Hey, {q}?", "Please, {q}?", "Hello, I have a question: {q}?", "I want to ask: {q}?"),
)
ALIKE = (
    ("how do I", "how can I"),
    ("which command", "what command"),
    ("which flag", "what flag"),
    ("start", "launch"),
    ("remove", "delete"),
    ("see", "look at"),
    ("it", "dynamo-vllm"),
    ("load", "add"),
    ("loads", "adds"),
    ("run", "start"),
    ("runs", "starts"),
    ("free", "release"),
    ("show", "print"),
    ("which command", "how"),
    ("how do I", "which command lets me"),
    ("how do I", "is there a way to"),
    ("how do I", "I want to"),
    ("can I", "is it possible to"),
    ("how do I", "what do I do to"),
)
"""Said in either way; in training now one, now the other."""
HELD_OUT = frozenset(question for known in FACTS for question in known.wordings.held_out)


def make(source: Source) -> Example:
    return about(source, source.one_of(FACTS))


def about(source: Source, known: Fact) -> Example:
    question = source.pick(known.wordings)
    if source.split == "train":
        question = _varied(source, question)
    # Held out are the questions; their frames are old and new ones.
    frame = source.one_of(FRAMES.train) if source.chance(0.5) else source.pick(FRAMES)
    asked = frame.format(q=question)
    asked = loosely(source, asked[0].upper() + asked[1:])
    in_chinese = is_chinese(question)
    turn = reply(known.chinese if in_chinese else known.answer, chinese=known.chinese)
    return Example("product", (user(asked), turn))


def _varied(source: Source, question: str) -> str:
    """Said a little otherwise, but never as it is held out."""
    said = question
    for one, other in ALIKE:
        if one in said and source.chance(0.25):
            said = re.sub(rf"\b{one}\b", other, said, count=1)
    words = said.split(" ")
    # What is asked has to be understood from its words, not from one sentence learnt by heart: some are
    # missing, some in another order.
    for _ in range(source.random.choices((0, 1, 2), (6, 3, 1))[0]):
        if len(words) > 3:
            del words[source.number(0, len(words) - 1)]
    if source.chance(0.15):
        at = source.number(0, len(words) - 1)
        words = words[at:] + words[:at]
    elif source.chance(0.1):
        source.random.shuffle(words)
    said = " ".join(words)
    return question if said in HELD_OUT else said
