"""Tests small demo models: training runs, the loss falls, and transformers reads the files as we do."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from harness import omni

pytestmark = pytest.mark.more


@pytest.fixture
def made(demo_models: Path) -> Path:
    return demo_models


def losses(curve: dict[str, Any]) -> list[float]:
    return [point["loss"] for point in curve["points"]]


def test_losses_fall(made: Path) -> None:
    chat, image = (json.loads((made / f"demo-{name}.json").read_bytes()) for name in ("chat", "image"))
    for curve in (chat["curve"], image["curves"]["autoencoder"], image["curves"]["diffusion"]):
        first, *_, last = losses(curve)
        assert last < 0.8 * first


@pytest.mark.parametrize("name", ["demo-chat", "demo-lora-capitals", "demo-lora-chinese"])
def test_cards_tell_how_it_was_made(made: Path, name: str) -> None:
    card = (made / name / "README.md").read_text()
    assert f"# {name}\n" in card and "scripts/demo all --smoke" in card and "| product | " in card
    assert (made / name / "curve.svg").read_text().startswith("<svg")


def test_transformers_computes_the_same_from_the_folder(made: Path) -> None:
    import torch
    from demo.export import load_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours, _ = load_model(made / "demo-chat")
    theirs = AutoModelForCausalLM.from_pretrained(made / "demo-chat", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(made / "demo-chat")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12 + 30"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    with torch.no_grad():
        assert torch.allclose(ours.logits(ours(ids)), theirs(ids).logits, atol=1e-4)
    said = theirs.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ours.greedy([ids[0].tolist()], end=-1, max_tokens=8) == [said[0, ids.shape[1] :].tolist()]


def test_transformers_renders_and_cuts_conversations_as_they_were_trained_on(made: Path) -> None:
    from demo.generator.mix import train_example
    from demo.template import messages, prompt
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "demo-chat")
    for index in range(60):
        example = train_example(1, index)
        rendered = tokenizer.apply_chat_template(
            messages(example.turns[:-1]),
            tools=list(example.tools) or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert rendered == prompt(example)


@pytest.mark.parametrize("style", ["capitals", "chinese"])
def test_adapters_fit_the_model_and_do_something(made: Path, style: str) -> None:
    from safetensors.torch import load_file

    folder = made / f"demo-lora-{style}"
    settings = json.loads((folder / "adapter_config.json").read_bytes())
    adapter = load_file(folder / "adapter_model.safetensors")
    for name, weight in load_file(made / "demo-chat" / "model.safetensors").items():
        module = "base_model.model." + name.removesuffix(".weight")
        if module.rpartition(".")[2] in settings["target_modules"]:
            assert adapter.pop(f"{module}.lora_A.weight").shape == (settings["r"], weight.shape[1])
            added = adapter.pop(f"{module}.lora_B.weight")
            assert added.shape == (weight.shape[0], settings["r"])
            assert added.abs().sum() > 0
    assert not adapter


def test_card_of_the_drawing_model_has_scores_and_pictures(made: Path) -> None:
    from demo.image.card import SHEET

    card = (made / "demo-image" / "README.md").read_text()
    assert "scripts/demo all --smoke" in card and "| 4 | 7.5 | " in card and SHEET[0] in card
    assert (made / "demo-image" / "curve.svg").read_text().startswith("<svg")
    assert (made / "demo-image" / "examples.png").read_bytes().startswith(b"\x89PNG")


def test_transformers_reads_prompts_as_the_drawing_model_does(made: Path) -> None:
    import torch
    from demo.image.export import load
    from demo.image.text import LENGTH, ids_of
    from transformers import CLIPTextModel, PreTrainedTokenizerFast

    folder = made / "demo-image"
    ours, texts = load(folder), ["a red circle on white", "", "画一个蓝色的圆环", "Something else " * 40]
    cutter = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    assert cutter.model_max_length == LENGTH
    found = cutter(texts, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt")
    ids = ids_of(ours.tokenizer, texts)
    assert torch.equal(found.input_ids, ids)
    theirs = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(theirs(ids)[0], ours.text(ids), atol=1e-5)


@pytest.mark.parametrize(("steps", "guidance"), [(3, 7.5), (2, 1.0)])
def test_diffusers_draws_the_same_pictures(made: Path, steps: int, guidance: float) -> None:
    if omni.lacks("diffusers"):
        omni.skip()
    import diffusers
    import numpy as np
    import torch
    from demo.image.export import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers has many, about others than us
        pipeline = diffusers.StableDiffusionPipeline.from_pretrained(made / "demo-image")
        pipeline.set_progress_bar_config(disable=True)
        drawn = pipeline(
            "a red circle",
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(5),
        ).images[0]
    ours = load(made / "demo-image").draw(["a red circle"], seed=5, steps=steps, guidance=guidance)[0]
    assert abs(np.asarray(drawn).astype(int) - ours).max() <= 1
