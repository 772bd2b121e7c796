"""The tiny models beside that of text: whole files that agree with each other, small enough for tests."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_models.audio_input import QWEN2_AUDIO, make_tiny_audio_input_model
from tiny_models.moe import EXPERTS, make_tiny_moe_model
from tiny_models.vision import FAMILIES, make_tiny_vision_model
from tokenizers import Tokenizer

from dynamo_vllm.models.tiny import FILES, make_tiny_model


@pytest.mark.parametrize("family", [*FAMILIES, "audio"])
def test_files_agree_with_each_other(family: str, tmp_path: Path) -> None:
    if family == "audio":
        folder = make_tiny_audio_input_model(tmp_path / "made")
        text, processors = QWEN2_AUDIO.audio, QWEN2_AUDIO.processors
    else:
        folder = make_tiny_vision_model(tmp_path / "made", family)
        text, processors = FAMILIES[family].image, FAMILIES[family].processors
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert config["text_config"]["vocab_size"] == tokenizer.get_vocab_size()
    (mark,) = (
        config[key] for key in ("image_token_id", "image_token_index", "audio_token_index") if key in config
    )
    assert tokenizer.encode(text).ids.count(mark) == 1
    assert text.rstrip("\n") in (folder / "chat_template.jinja").read_text()
    assert 500_000 < sum(math.prod(shape) for shape in shapes_in(folder).values()) < 1_500_000
    assert {path.name for path in folder.iterdir()} == {*FILES, *processors}


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", framework="numpy") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 (no dict)


def test_experts_have_the_shapes_of_the_config(tmp_path: Path) -> None:
    folder = make_tiny_moe_model(tmp_path / "made")
    config = json.loads((folder / "config.json").read_text())
    shapes = shapes_in(folder)
    inner, hidden = config["moe_intermediate_size"], config["hidden_size"]
    last = f"model.layers.3.mlp.experts.{EXPERTS - 1}"
    assert config["num_experts"] == EXPERTS
    assert shapes[f"{last}.up_proj.weight"] == (inner, hidden)
    assert shapes[f"{last}.down_proj.weight"] == (hidden, inner)
    assert shapes["model.layers.3.mlp.gate.weight"] == (EXPERTS, hidden)
    assert {path.name for path in folder.iterdir()} == set(FILES)


def test_folder_of_another_family_is_made_anew(tmp_path: Path) -> None:
    folder = make_tiny_vision_model(tmp_path / "made", "llava")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert (make_tiny_vision_model(folder, "llava") / "model.safetensors").stat().st_mtime_ns == before
    make_tiny_vision_model(folder, "qwen2-vl")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2_vl"


def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "text")
    with pytest.raises(FileExistsError):
        make_tiny_vision_model(folder, "llava")
