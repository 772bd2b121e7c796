"""The tiny model: whole files, readable tokens, safe to ask for twice."""

from __future__ import annotations

import hashlib
import json
import string
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from dynamo_vllm.models import tiny
from dynamo_vllm.models.tiny import FILES, TURN_END, TURN_END_ID, TURN_START_ID, make_tiny_model

ASCII_TEXT = string.digits + string.ascii_letters + string.punctuation + " \t\n\r"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_folder_holds_the_listed_files_and_nothing_beside_it(model: Path) -> None:
    assert sorted(path.name for path in model.iterdir()) == sorted(FILES)
    assert list(model.parent.iterdir()) == [model]


def test_config_and_tokenizer_agree_on_size_and_end_of_turn(model: Path, tokenizer: Tokenizer) -> None:
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["eos_token_id"] == tokenizer.token_to_id(TURN_END) == TURN_END_ID
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == TURN_END_ID


def test_weights_have_the_shapes_of_the_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    with safe_open(model / "model.safetensors", framework="numpy") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 (no dict)
    vocab, hidden, head_dim = config["vocab_size"], config["hidden_size"], config["head_dim"]
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (vocab, hidden)
    assert shapes["model.layers.3.self_attn.k_proj.weight"] == (2 * head_dim, hidden)
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (head_dim,)
    assert len(shapes) == 3 + 11 * config["num_hidden_layers"]


def test_ascii_text_survives_encoding_and_other_alphabets_become_question_marks(tokenizer: Tokenizer) -> None:
    for text in (ASCII_TEXT, 'Say "no":\n{"a": [1, 2.5, null]}', " bala mere\ttulu  x", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode(tokenizer.encode("naïve 日本").ids) == "na?ve ?"
    assert all(len(tokenizer.encode(character).ids) == 1 for character in ASCII_TEXT), "for grammars"


def test_every_id_decodes_to_ascii_text(tokenizer: Tokenizer) -> None:
    ids = range(tokenizer.get_vocab_size())
    texts = [tokenizer.decode([index], skip_special_tokens=False) for index in ids]
    assert all(text and text.isascii() for text in texts)
    assert len(set(texts)) == len(texts)


def test_turn_marks_are_single_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids
    assert (ids[0], ids[-1]) == (TURN_START_ID, TURN_END_ID)
    assert not {TURN_START_ID, TURN_END_ID} & set(ids[1:-1])


def test_chat_template_stands_in_both_places(model: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    assert json.loads((model / "tokenizer_config.json").read_text())["chat_template"] == template
    assert "<|im_start|>assistant" in template


def test_second_call_leaves_the_files_alone(model: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    assert make_tiny_model(model) == model
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_builders_racing_for_one_folder_all_get_the_model_to_the_byte(model: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(make_tiny_model, [tmp_path / "shared"] * 3))
    assert digests(folders[0]) == digests(model)
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_older_revision_and_a_model_with_a_lost_file_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    assert sorted(path.name for path in make_tiny_model(folder).iterdir()) == sorted(FILES)
    monkeypatch.setattr(tiny, "REVISION", tiny.REVISION + 1)
    make_tiny_model(folder)
    assert json.loads((folder / "config.json").read_text())["dynamo_vllm_tiny_revision"] == tiny.REVISION
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_folder_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="something other than a tiny model"):
        make_tiny_model(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_building_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from dynamo_vllm.models.tiny import make_tiny_model;"
        "make_tiny_model(pathlib.Path(sys.argv[1]));"
        "sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "tiny"], check=True, timeout=30)
