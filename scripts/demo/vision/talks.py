"""Conversations about pictures: one picture and some questions, two at once, or a second one later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from demo.generator.base import Example, Source, Turn, reply
from demo.generator.mix import source_of
from demo.vision import questions
from demo.vision.figures import Scene, draw_scene
from demo.vision.questions import KINDS, Ask, Asked, ask_about

ASKED = 4
"""Questions in a conversation that is trained on: they share the work of looking."""


@dataclass(frozen=True)
class Talk:
    example: Example
    scenes: tuple[Scene, ...]
    """In the order in which the conversation has their pictures."""


def train_talk(seed: int, index: int) -> Talk:
    """The same for a seed and an index, whoever makes it and in whatever order."""
    source = source_of("train", seed, index)
    kind = source.random.choices((_one, _two, _later), (80, 10, 10))[0]
    return kind(source)


def _one(source: Source) -> Talk:
    scene = draw_scene(source)
    return _talk("pictures", [(scene,)], [[ask_about(source, scene, KINDS) for _ in range(ASKED)]], source)


def _two(source: Source) -> Talk:
    scenes = draw_scene(source), draw_scene(source)
    return _talk("pictures", [scenes], [[_of_two(source, scenes, KINDS) for _ in range(ASKED)]], source)


def _later(source: Source) -> Talk:
    """Questions are about the last picture there is."""
    scenes = draw_scene(source), draw_scene(source)
    asked = [[ask_about(source, scene, KINDS) for _ in range(ASKED // 2)] for scene in scenes]
    return _talk("pictures", [(scene,) for scene in scenes], asked, source)


def _of_two(source: Source, scenes: tuple[Scene, Scene], kinds: dict[Ask, int]) -> Asked:
    at = source.number(0, 1)
    asked = ask_about(source, scenes[at], kinds, may_be_chinese=False)
    text = source.pick(questions.WHICH).format(nth=questions.NTH[at], asked=asked.question)
    return Asked(asked.kind, text[0].upper() + text[1:], asked.answer)


def _talk(skill: str, scenes: list[tuple[Scene, ...]], asked: list[list[Asked]], source: Source) -> Talk:
    """Each group of pictures comes with the first of its questions."""
    turns: list[Turn] = []
    for shown, group in zip(scenes, asked, strict=True):
        for at, one in enumerate(group):
            count = 0 if at else len(shown)
            turns.append(
                Turn("user", one.question, pictures=count, pictures_last=bool(count) and source.chance(0.3))
            )
            # None: with `enable_thinking: false` the prompt has the empty block already.
            turns.append(reply(one.answer, None if source.chance(0.15) else ""))
    return Talk(Example(skill, tuple(turns)), tuple(scene for shown in scenes for scene in shown))


def _single(skill: str, ask: Ask, *, unseen: bool = False) -> Callable[[Source], Talk]:
    def make(source: Source) -> Talk:
        while True:
            scene = draw_scene(source, 1 if unseen else None, unseen=unseen)
            asked = ask(source, scene, questions.Way(source.chance(0.2), source.chance(0.2)))
            if asked is not None:
                return _held_out(skill, (scene,), asked, source)

    return make


def _pair(source: Source) -> Talk:
    scenes = draw_scene(source), draw_scene(source)
    return _held_out("two pictures", scenes, _of_two(source, scenes, _plain()), source)


def _unseen(source: Source) -> Talk:
    ask = source.one_of((questions.colour, questions.shape, questions.describe))
    return _single("unseen pairs", ask, unseen=True)(source)


def _held_out(skill: str, scenes: tuple[Scene, ...], asked: Asked, source: Source) -> Talk:
    made = _talk(skill, [scenes], [[asked]], source)
    question, answer = made.example.turns
    return Talk(Example(skill, (question, reply(answer.content))), made.scenes)


def _plain() -> dict[Ask, int]:
    return dict.fromkeys(questions.ATTRIBUTES.values(), 1)


HELD_OUT: dict[str, Callable[[Source], Talk]] = {
    **{name: _single(name, ask) for name, ask in questions.ATTRIBUTES.items()},
    "relation": _single("relation", questions.relation),
    "exists": _single("exists", questions.exists),
    "describe": _single("describe", questions.describe),
    "two pictures": _pair,
    "unseen pairs": _unseen,
}


def held_out(skill: str, seed: int, count: int) -> Iterator[Talk]:
    for index in range(count):
        yield HELD_OUT[skill](source_of("held-out", seed, index))
