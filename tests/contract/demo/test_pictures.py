"""Tests images of figures and questions about them: repeatable, correct, without the held-out set."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import numpy as np
import pytest
from demo.generator.base import Pool
from demo.generator.mix import source_of
from demo.generator.words import is_chinese
from demo.template import messages, prompt, render
from demo.vision import questions
from demo.vision.drawing import draw, noise_seed
from demo.vision.figures import CLEAR, COLOURS, FIELDS, MOST, SHAPES, UNSEEN, Figure, Scene, draw_scene
from demo.vision.questions import NUMBERS, PLACES
from demo.vision.talks import HELD_OUT, Talk, held_out, train_talk

COUNT = 40
WORDS = re.compile(r"[a-z]+")


@cache
def trained() -> tuple[Talk, ...]:
    return tuple(train_talk(1, index) for index in range(250))


@cache
def asked(skill: str) -> tuple[Talk, ...]:
    return tuple(held_out(skill, 2, COUNT))


@cache
def scenes() -> tuple[Scene, ...]:
    return tuple(draw_scene(source_of("train", 3, index)) for index in range(60))


def test_talks_and_scenes_are_the_same_each_time() -> None:
    assert train_talk(1, 7) == trained()[7]
    assert train_talk(2, 7) != trained()[7]
    assert tuple(held_out("count", 2, 3)) == asked("count")[:3]
    scene, again = scenes()[1], draw_scene(source_of("train", 3, 1))
    assert (draw(scene, 48, noise_seed(scene)) == draw(again, 48, noise_seed(again))).all()


def test_no_wording_and_no_picture_is_in_both_splits() -> None:
    pools = [value for value in vars(questions).values() if isinstance(value, Pool)]
    assert len(pools) > 10
    for pool in pools:
        assert not {_flat(one) for one in pool.train} & {_flat(one) for one in pool.held_out}
    said = {_flat(turn.content) for talk in trained() for turn in talk.example.turns if turn.role == "user"}
    shown = {scene for talk in trained() for scene in talk.scenes if scene.figures}
    for skill in HELD_OUT:
        assert not said & {_flat(talk.example.turns[0].content) for talk in asked(skill)}, skill
        assert not shown & {scene for talk in asked(skill) for scene in talk.scenes}, skill


def test_unseen_pairs_are_never_shown_in_training_and_always_asked_for() -> None:
    shown = {(one.colour, one.shape) for talk in trained() for scene in talk.scenes for one in scene.figures}
    assert len(shown) > 35 and not shown & set(UNSEEN)
    for talk in asked("unseen pairs"):
        (figure,) = talk.scenes[0].figures
        assert (figure.colour, figure.shape) in UNSEEN


def test_figures_keep_apart_from_each_other_from_the_edge_and_from_the_lines_between_fields() -> None:
    for scene in scenes():
        for at, one in enumerate(scene.figures):
            for value in (one.x, one.y):
                assert one.radius <= value <= 1 - one.radius
                assert all(abs(value - line) >= CLEAR - 1e-3 for line in (1 / 3, 2 / 3))
            for other in scene.figures[at + 1 :]:
                assert np.hypot(one.x - other.x, one.y - other.y) > one.radius + other.radius


def test_the_drawing_shows_what_the_scene_says() -> None:
    """Checks only the pixels: how many figures there are, where, and in which colour."""
    counts: Counter[int] = Counter()
    for scene in scenes()[:25]:
        found = sorted(blobs(draw(scene, 64), scene.background))
        counts[len(found)] += 1
        wanted = sorted((one.field, one.colour) for one in scene.figures)
        assert found == wanted
    assert len(counts) > 4


@pytest.mark.parametrize("skill", ["colour", "shape", "count", "position"])
def test_answers_follow_from_what_the_question_names(skill: str) -> None:
    """Computes the answer from the words of the question, without the code that wrote it."""
    checked = 0
    for talk in asked(skill):
        question, answer = (turn.content for turn in talk.example.turns)
        if is_chinese(question):
            continue
        checked += 1
        meant = named(question.lower().replace("center", "centre"), talk.scenes[0], skill)
        if skill == "count":
            said = NUMBERS[len(meant)]
            assert (
                answer == said or f" {said} " in answer or (not meant and answer.startswith("There are no"))
            )
            continue
        (figure,) = meant
        wanted = {"colour": figure.colour, "shape": figure.shape, "position": figure.field}[skill]
        shown = PLACES[wanted] if skill == "position" else wanted
        assert answer == wanted or answer.endswith(f" {shown}."), (question, answer)
    assert checked > COUNT / 2


def test_every_number_place_colour_and_shape_is_asked_for() -> None:
    said = Counter(turn.content for talk in trained() for turn in talk.example.turns if turn.role != "user")
    for word in (*NUMBERS, *COLOURS, *SHAPES, *(field for row in FIELDS for field in row), "yes", "no"):
        assert said[word], word


def test_pictures_stand_where_the_client_put_them() -> None:
    layouts = set()
    for talk in trained():
        first = talk.example.turns[0]
        assert render(talk.example).count("<image>") == len(talk.scenes)
        parts = [part["type"] for part in messages(talk.example.turns)[0]["content"]]
        assert parts.index("text") == (0 if first.pictures_last else first.pictures)
        pictures = "<image>\n" * first.pictures
        content = first.content + pictures if first.pictures_last else pictures + first.content
        assert prompt(talk.example).partition("<|im_end|>")[0] == f"<|im_start|>user\n{content}"
        layouts.add((first.pictures, first.pictures_last))
    assert len(layouts) == 4


def named(question: str, scene: Scene, skill: str) -> list[Figure]:
    """Returns the figures that a question names."""
    words = {
        word.removesuffix("es") if word == "crosses" else word.rstrip("s") for word in WORDS.findall(question)
    }
    words |= set(WORDS.findall(question))
    colours = [one for one in COLOURS if one in words]
    shapes = [one for one in SHAPES if one in words]
    # The longest place that the question has: "top left" and not "top".
    places = [] if skill == "position" else [one for one in PLACES if PLACES[one] in question]
    place = max(places, key=len, default=None)
    return [
        one
        for one in scene.figures
        if (not colours or one.colour in colours)
        and (not shapes or one.shape in shapes)
        and place in (None, one.field)
    ]


def blobs(picture: np.ndarray, background: tuple[int, int, int]) -> list[tuple[str, str]]:
    """Returns the field and colour of each connected area that is not background."""
    size = len(picture)
    left = {(int(y), int(x)) for y, x in np.argwhere(np.abs(picture.astype(int) - background).max(-1) > 40)}
    found = []
    while left:
        spot, edge = [], [left.pop()]
        while edge:
            y, x = edge.pop()
            spot.append((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
        middle = (np.mean(spot, 0) + 0.5) / size
        row, column = (middle * 3).astype(int)
        colour = picture[tuple((middle * size).astype(int))].astype(int)
        nearest = min(COLOURS, key=lambda name: float(np.abs(colour - COLOURS[name]).sum()))
        found.append((FIELDS[row][column], nearest))
    assert len(found) <= MOST
    return found


def _flat(text: str) -> str:
    return text.lower().replace("color", "colour").replace("center", "centre").strip("?.!。 ")
