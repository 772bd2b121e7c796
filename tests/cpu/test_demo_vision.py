"""Tests a small demo-vision: images are rendered, training works, and vLLM reads the folder as we do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cpu.children import Children

pytestmark = pytest.mark.more


@pytest.fixture
def made(demo_models: Path) -> Path:
    return demo_models


def test_painter_of_the_training_agrees_with_pillow() -> None:
    import torch
    from demo.generator.mix import source_of
    from demo.vision.drawing import draw
    from demo.vision.figures import FIELDS, draw_scene
    from demo.vision.painting import centres, paint
    from demo.vision.rows import Scenes

    scenes = [draw_scene(source_of("train", 1, index)) for index in range(40)]
    numbers = Scenes.of(scenes)
    figures, backgrounds = torch.from_numpy(numbers.figures), torch.from_numpy(numbers.backgrounds)
    painted = paint(figures, backgrounds, 96, varied=False).numpy().astype(int)
    apart = np.abs(painted - np.stack([draw(scene, 96) for scene in scenes]).astype(int))
    assert apart.mean() < 0.6  # edges only
    assert (apart > 100).mean() < 1e-4
    varied = paint(figures, backgrounds, 96).numpy().astype(int)
    assert 0.5 < np.abs(varied - painted).mean() < 6
    shapes, colours, fields = centres(figures, 8)
    assert (shapes > 0).sum(1).tolist() == (colours > 0).sum(1).tolist()
    assert (shapes > 0).sum(1).tolist() == [len(scene.figures) for scene in scenes]
    names = [name for row in FIELDS for name in row]
    for scene, found in zip(scenes, fields.tolist(), strict=True):
        assert sorted(names[at - 1] for at in found if at) == sorted(one.field for one in scene.figures)


def test_it_learns_where_figures_are_and_what_to_say(made: Path) -> None:
    found = json.loads((made / "demo-vision.json").read_bytes())
    first, last = found["curve"]["points"][0], found["curve"]["points"][-1]
    assert last["loss"] < 0.9 * first["loss"]
    assert last["spotting"] < 0.8 * found["tower_curve"]["points"][0]["spotting"]
    card = (made / "demo-vision" / "README.md").read_text()
    assert (
        "# demo-vision\n" in card
        and "steps of the tower alone" in card
        and "| position | " in card
        and "| sums | " in card
    )
    assert (made / "demo-vision" / "curve.svg").read_text().startswith("<svg")


def test_vllm_says_what_torch_says_of_one_and_of_two_pictures(
    made: Path, children: Children, tmp_path: Path
) -> None:
    import torch
    from demo.template import prompt
    from demo.vision import export, score
    from demo.vision.rows import widened
    from demo.vision.talks import held_out

    folder = _with_opinions(made / "demo-vision", tmp_path / "model")
    model, tokenizer = export.load(folder)
    talks = [talk for skill in ("colour", "two pictures") for talk in held_out(skill, 2, 4)]
    chats = {str(number): score.with_pictures(talk) for number, talk in enumerate(talks)}
    answers = children.ask("bare:chats", str(folder), chats, 8, limit_mm_per_prompt={"image": 2})
    said = set()
    for talk, (_, their_ids, theirs) in zip(talks, answers.values(), strict=True):
        ids = widened(tokenizer.encode(prompt(talk.example)).ids, model.image_token, model.tower.tokens)
        assert their_ids == ids
        pictures = torch.from_numpy(np.stack([score.drawn(scene) for scene in talk.scenes]))
        assert model.greedy([ids], pictures, end=-1, max_tokens=8) == [theirs]
        said.add(tuple(theirs))
    assert len(said) > 4  # pictures and questions matter


def _with_opinions(folder: Path, out: Path) -> Path:
    """Spreads the model's weights so far that each prompt gets a different answer."""
    import torch
    from demo.vision import export

    model, tokenizer = export.load(folder)
    torch.manual_seed(0)
    for part in (model.language_model, model.multi_modal_projector):
        for weight in part.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.25)
    return export.save(model, tokenizer, out)
