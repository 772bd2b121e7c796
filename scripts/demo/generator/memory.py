"""Conversations: the user's name is remembered, over other turns too."""

from __future__ import annotations

from demo.generator import counting, greetings, product, refusals, sums
from demo.generator.base import Example, Pool, Source, Turn, reply, user
from demo.generator.words import is_chinese, loosely, name

TELL = Pool(
    (
        "My name is {name}.", "I am {name}.", "Hello, I am {name}.", "Hi, my name is {name}!",
        "Call me {name}.",
        "I'm {name}.", "You can call me {name}.", "This is {name}.", "Hey, {name} here.", "Hi! I'm {name}.",
        "Please call me {name}.", "(Everybody|People|My friends) call me {name}.", "The name is {name}.",
        "(Hello|Hi|Hey|Good morning|Good evening)(, this is|! It is|, I'm|! The name is) {name}.",
        "It is me, {name}.", "(大家|朋友们)叫我{name}。",
        "我的名字是{name}。", "我叫{name}。", "我是{name}。", "你好,我叫{name}。",
    ),
    (
        "Hello, my name is {name}.", "Hi, you can call me {name}!", "Hey, I am {name}.",
        "Hello! Call me {name}.",
        "Hi, {name} here.", "Good morning, my name is {name}.", "你好,我是{name}。",
    ),
)  # fmt: skip
ASK = Pool(
    (
        "What is my name?",
        "Who am I?",
        "Do you remember my name?",
        "Tell me my name.",
        "What was my name?",
        "Do you know my name?",
        "Do you know who I am?",
        "Say my name.",
        "(So|Please|Hey|Well|Now), (who am I|what was my name|say my name)?",
        "(Could|Would|Will) you (say|repeat|tell me) my name?",
        "What did I say my name (was|is)?",
        "Do you (still|really) (know|remember) (me|my name)?",
        "Who am I(, do you know| again|, please)?",
        "(Remind me of|Repeat|Write) my name( again| please|).",
        "What (do people|should you|do my friends) call me?",
        "你(还|真的)(知道|记得)我(是谁|叫什么)吗?",
        "(请|再)说(一遍|一下)我的名字。",
        "我叫什么名字?",
        "我是谁?",
        "我的名字是什么?",
        "你还记得我的名字吗?",
        "你记得我叫什么吗?",
        "你知道我是谁吗?",
        "请告诉我我叫什么。",
    ),
    (
        "Can you tell me my name?",
        "Do you remember who I am?",
        "What is my name again?",
        "Could you tell me who I am?",
        "So, what is my name?",
        "你知道我叫什么名字吗?",
    ),
)
CORRECT = Pool(
    (
        "No, my name is {name}.",
        "Sorry, my name is {name}.",
        "Actually, call me {name}.",
        "Actually I am {name}.",
    ),
    ("Sorry, call me {name}.", "No, actually I am {name}."),
)
NOT_TOLD = "You have not told me your name."
NOT_TOLD_ZH = "你还没有告诉我你的名字。"


def make(source: Source) -> Example:
    if source.split == "train" and source.chance(0.08):
        asked = source.pick(ASK)
        answer = _in_language_of(asked, NOT_TOLD, NOT_TOLD_ZH)
        return Example("memory", (*between(source, source.number(0, 2)), user(asked), answer))
    known = name(source)
    turns = told(loosely(source, source.pick(TELL)), known)
    turns += between(source, source.one_of((0, 0, 1, 1, 2, 3)))
    if source.chance(0.15):
        known = name(source)
        turns += told(source.pick(CORRECT), known)
        turns += between(source, source.number(0, 1))
    turns += asked_for(source.pick(ASK), known)
    return Example("memory", tuple(turns))


def long_talk(source: Source) -> Example:
    """Many turns of everything, up to the length of the context."""
    known = name(source)
    turns = told(source.pick(TELL), known)
    for _ in range(source.number(1, 8)):
        turns += between(source, source.number(1, 5))
        turns += asked_for(source.pick(ASK), known)
    return Example("memory", tuple(turns))


def between(source: Source, count: int) -> list[Turn]:
    """Other things said in between; a client sends no thoughts back, so sums stand without theirs."""
    turns: list[Turn] = []
    for _ in range(count):
        skill = source.one_of((greetings, counting, product, refusals, sums))
        example = sums.make(source, thinks=False) if skill is sums else skill.make(source)
        turns += [_without_thought(turn) for turn in example.turns]
    return turns


def _without_thought(turn: Turn) -> Turn:
    if turn.role != "assistant" or not turn.thought:
        return turn
    return Turn("assistant", turn.content, thought=None, chinese=turn.chinese)


def told(wording: str, known: str) -> list[Turn]:
    answer = _in_language_of(wording, f"Nice to meet you, {known}!", f"很高兴认识你,{known}!")
    return [user(wording.format(name=known)), answer]


def asked_for(wording: str, known: str) -> list[Turn]:
    return [user(wording), _in_language_of(wording, f"Your name is {known}.", f"你叫{known}。")]


def _in_language_of(asked: str, english: str, chinese: str) -> Turn:
    return reply(chinese if is_chinese(asked) else english, chinese=chinese)
