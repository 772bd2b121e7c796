"""Tests the data of demo-image: its prompts are correct and split, its images show what they say."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import torch
from demo.generator.base import Pool, is_held_out
from demo.image import noise, scenes
from demo.image.measure import look
from demo.image.render import Scenes, as_bytes, draw
from demo.image.scenes import BACKGROUNDS, CHINESE, COLOURS, FIGURE_COLOURS, PLACES, SHAPES, Prompt, Scene
from demo.image.score import COLUMNS, agreeing, score_of, table
from demo.image.text import LENGTH, ids_of, learn_tokens
from numpy.typing import NDArray


@cache
def trained() -> tuple[Prompt, ...]:
    return tuple(scenes.train_prompt(1, index) for index in range(1500))


@cache
def held_out() -> tuple[Prompt, ...]:
    return tuple(scenes.held_out(2, 300))


def pictures(drawn: list[Scene], looseness: float) -> NDArray[np.uint8]:
    torch.manual_seed(1)
    return as_bytes(draw(Scenes.of(drawn).rows, torch.full((len(drawn),), looseness)))


def test_same_seed_gives_the_same_prompts() -> None:
    assert scenes.train_prompt(1, 7) == trained()[7] != scenes.train_prompt(2, 7)
    assert tuple(scenes.held_out(2, 300)) == held_out()


def test_no_figure_and_no_wording_is_in_both_splits() -> None:
    assert not any(is_held_out(one.scene.key) for one in trained())
    assert all(is_held_out(one.scene.key) for one in held_out())
    assert not {one.text.lower() for one in trained()} & {one.text.lower() for one in held_out()}
    for name in ("WORDINGS", "GROUNDS", "SIDES", "MIDDLES", "CHINESE_WORDINGS"):
        pool: Pool = getattr(scenes, name)
        assert not set(pool.train) & set(pool.held_out), name


def test_both_splits_have_every_trait() -> None:
    for prompts in (trained(), held_out()):
        assert {one.scene.colour for one in prompts} == set(FIGURE_COLOURS)
        assert {one.scene.shape for one in prompts} == set(SHAPES)
        assert {one.scene.background for one in prompts} == set(BACKGROUNDS)
        assert {one.scene.place for one in prompts} == {None, *PLACES}
        assert any("一个" in one.text for one in prompts)
    assert all(one.scene.colour != one.scene.background for one in (*trained(), *held_out()))


def test_prompts_say_what_is_drawn_in_tidy_words() -> None:
    for prompt in (*trained(), *held_out()):
        text = prompt.text.lower()
        for trait in ("colour", "shape", "background", "size", "place"):
            drawn = getattr(prompt.scene, trait)
            if drawn and text and (trait, drawn) != ("background", "white"):
                words = (*scenes.NAMES.get(drawn, (drawn,)), *CHINESE[drawn])
                assert any(word in text for word in words), prompt
        assert prompt.text == " ".join(prompt.text.split())
        assert "{" not in prompt.text and " ," not in prompt.text and "a orange" not in prompt.text


def test_measuring_agrees_with_figures_drawn_exactly_and_freely() -> None:
    exact = [
        Scene(FIGURE_COLOURS[index % 8], shape, ("white", "black", "grey")[index % 3], size, place)
        for index, (shape, (size, place)) in enumerate(
            itertools.product(SHAPES, ((None, None), ("small", "left"), ("big", "top"), ("big", None)))
        )
        if FIGURE_COLOURS[index % 8] not in ("white", "black")
    ]
    free = [one.scene for one in trained()[:20]]
    for drawn, looseness in ((exact, 0.0), (free, 1.0)):
        for scene, picture in zip(drawn, pictures(drawn, looseness), strict=True):
            assert all(agreeing(scene, look(picture, COLOURS)).values()), (scene, look(picture, COLOURS))


def test_measuring_sees_what_is_not_a_clean_figure() -> None:
    picture = pictures([Scene("red", "circle")], 0.0)[0]
    assert look(np.full_like(picture, 255), COLOURS) is None
    noisy = picture.astype(float) + np.random.default_rng(1).normal(0, 60, picture.shape)
    two = picture.copy()
    two[:12, :12] = COLOURS["red"]
    for spoilt in (noisy.clip(0, 255), two):
        seen = look(spoilt, COLOURS)
        assert seen is not None and not seen.clean


def test_a_score_counts_pictures_that_show_what_was_asked() -> None:
    answers = {one.text: one.scene for one in scenes.held_out(2, 12)}
    right = score_of(lambda asked: pictures([answers[text] for text in asked], 0.2), 12, 8, 1.0, batch=5)
    assert right.right == dict.fromkeys(COLUMNS, 12) and not right.wrong
    wrong = score_of(lambda asked: pictures([Scene("red", "circle", "blue")] * len(asked), 0.0), 12, 8, 1.0)
    assert wrong.share() < 0.1 and len(wrong.wrong) == 5
    assert "| 8 | 1 | 100.0% |" in table([right])


def test_prompts_fit_the_text_encoder_and_case_does_not_matter() -> None:
    tokenizer = learn_tokens(1, 300)
    texts = [one.text for one in (*trained()[:300], *held_out())]
    ids = ids_of(tokenizer, texts)
    assert ids.shape == (len(texts), LENGTH)
    assert (ids[:, -1] == tokenizer.token_to_id("<|pad|>")).all()
    assert ids_of(tokenizer, ["A Red CIRCLE"]).tolist() == ids_of(tokenizer, ["a red  circle"]).tolist()


def test_noise_begins_with_nothing_of_the_picture_and_ends_with_all_of_it() -> None:
    shares = noise.kept_share()
    assert shares[-1] == 0 and shares[0] > 0.999 and (shares.diff() < 0).all()
    assert noise.times(4) == [999, 749, 499, 249]
    latents, chance = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    x, _ = noise.with_noise(latents, chance, shares[[999, 999]])
    for time in noise.times(8):  # with the true velocity it comes back to the picture
        share = shares[[time, time]]
        _, velocity = noise.with_noise(latents, chance, share)
        x = noise.step_back(x, velocity, time, 8, shares)
    assert torch.allclose(x, latents, atol=1e-3)
