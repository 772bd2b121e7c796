"""Parameter counts: against what the makers publish, and against the tensors of this project's models."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from tiny_models import vision

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.models import demo, tiny
from dynamo_vllm.sizing import families, formats, memory
from dynamo_vllm.sizing.parts import Part

HERE = Path(__file__).parent
RECIPES = HERE.parents[2] / "deploy" / "recipes"
R1 = RECIPES / "deepseek-r1" / "model" / "config.json"
GPT_OSS = RECIPES / "gpt-oss"


def config(name: str) -> dict[str, object]:
    path = {
        "deepseek-r1": R1,
        "gpt-oss-20b": GPT_OSS / "20b" / "config.json",
        "gpt-oss-120b": GPT_OSS / "120b" / "config.json",
        "qwen3-8b": RECIPES / "qwen3-single-gpu" / "model" / "config.json",
    }.get(name, HERE / "models" / f"{name}.json")
    found: dict[str, object] = json.loads(path.read_text())
    return found


TOTALS = {  # The bytes of the published bfloat16 files, halved.
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552,
    "bge-reranker-v2-m3": 567_755_777,
    "whisper-large-v3-turbo": 808_878_080,
    "deepseek-v2-lite": 15_706_484_224,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
}


def test_totals_are_the_published_ones() -> None:
    assert {name: families.read(config(name), name).total for name in TOTALS} == TOTALS


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("mixtral-8x7b", 46.7, 12.9),
        ("deepseek-r1", 671, 37),
        ("deepseek-v2-lite", 15.7, 2.4),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
        ("glm-4.5-air", 106, 12),
    ],
)
def test_experts_are_counted_once_in_all_and_as_chosen_per_token(
    name: str, total: float, active: float
) -> None:
    model = families.read(config(name), name)
    assert model.total / 1e9 == pytest.approx(total, rel=0.01)
    # Some makers count the table of embeddings, of which a token takes one row, and some do not.
    counts = (model.active, model.active - model.by_part()[Part.EMBEDDINGS])
    nearest = min((count / 1e9 for count in counts), key=lambda count: abs(count - active))
    assert nearest == pytest.approx(active, rel=0.1 if name.startswith(("deepseek-v2", "glm")) else 0.02)


def test_weight_bytes_are_those_of_the_published_files() -> None:
    files = {"gpt-oss-20b": 13_761_264_768, "gpt-oss-120b": 65_248_815_744, "qwen3-8b": 16_381_470_720}
    for name, published in files.items():
        found = config(name)
        size = memory.weight_bytes(families.read(found, name), formats.of(found, name, None, None))
        assert size == pytest.approx(published, rel=1e-5)


def test_bytes_of_deepseek_with_its_layer_for_speculation_are_those_of_its_files() -> None:
    """On disk there is one layer more, with its own table, head and a joining matrix."""
    whole = config("deepseek-r1")
    model = families.read(whole, "r1")
    form = formats.of(whole, "r1", None, None)
    last = sum(form.bytes_of(weight) for weight in model.layers[-1].weights)
    extra = last + 2 * (2 * model.vocabulary * model.hidden + 2 * model.hidden**2 + 3 * model.hidden)
    # The published size has the files' headers in it.
    assert memory.weight_bytes(model, form) + extra == pytest.approx(688_586_727_753, rel=1e-4)


# --- this project's own models --------------------------------------------------------------------------


def stored(path: Path) -> int:
    """Parameters in a safetensors file, from its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


@pytest.mark.parametrize("name", [name for name in ("chat", "vision") if demo.is_here(name)])
def test_demo_models_have_as_many_parameters_as_their_files(name: str) -> None:
    folder = demo.folder(name)
    model = families.read(json.loads((folder / "config.json").read_text()), name)
    assert model.total == stored(folder / "model.safetensors")


@pytest.mark.parametrize("name", list(vision.FAMILIES))
def test_tiny_vision_models_have_as_many_parameters_as_their_tensors(name: str) -> None:
    family = vision.FAMILIES[name]
    words = {token: number for number, token in enumerate((*tiny.SPECIAL_TOKENS, *family.specials))}
    model = families.read(family.config(words), name)
    shapes = [shape for _, shape in family.shapes(len(words))]
    assert model.total == sum(map(math.prod, shapes))
    assert 0 < model.by_part()[Part.VISION] < model.total


# --- what is not known ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qwen3-8b", {"model_type": "mamba2"}, "model_type 'mamba2' is not one whose layers are known here;"),
        ("qwen3-8b", {"model_type": None}, "model_type is missing"),
        ("qwen3-8b", {"hidden_size": None}, "hidden_size is missing"),
        ("qwen3-8b", {"hidden_size": "4096"}, "hidden_size is '4096', not a whole number"),
        ("qwen3-8b", {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be 1 or more"),
        ("qwen3-8b", {"layer_types": ["linear_attention"] * 36}, "layer_types has 'linear_attention'"),
        ("qwen3-8b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 36 layers"),
        ("qwen3-8b", {"layer_types": "full"}, "layer_types is not a list"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 200}, "num_experts_per_tok 200 is above the 128 experts"),
    ],
)
def test_what_cannot_be_counted_is_named(name: str, change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        families.read({**config(name), **change}, "a/config.json")
    assert str(refused.value).startswith("a/config.json: ")
    assert said in str(refused.value)


def test_a_tower_that_is_not_known_is_refused() -> None:
    model: dict[str, object] = {
        "model_type": "llava",
        "text_config": config("llama-3.1-8b"),
        "vision_config": {"model_type": "x"},
    }
    with pytest.raises(ConfigError, match="model_type 'x' is not a known vision encoder"):
        families.read(model, "llava")
    with pytest.raises(ConfigError, match="vision_config is missing"):
        families.read({**model, "vision_config": None}, "llava")
