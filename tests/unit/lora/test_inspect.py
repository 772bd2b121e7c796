"""Each kind of adapter that must not reach the engine, and the ones that must."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_vllm.errors import AdapterRefused
from dynamo_vllm.lora.base import AdapterFacts
from dynamo_vllm.lora.base_model import BaseModel, read_base_model
from dynamo_vllm.lora.inspect import inspect
from dynamo_vllm.lora.tensors import Tensor, first_not_finite, read_header
from harness.adapters import lora_arrays, make_adapter, read_safetensors, write_safetensors

HIDDEN, KV, VOCAB = 32, 16, 50
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
    **{
        f"model.layers.{layer}.self_attn.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "q_proj": (HIDDEN, HIDDEN),
            "k_proj": (KV, HIDDEN),
            "v_proj": (KV, HIDDEN),
        }.items()
    },
}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    write_safetensors(folder / "model.safetensors", arrays | {"model.norm.weight": np.ones(HIDDEN)})
    return folder


@pytest.fixture
def adapter(tmp_path: Path, base_folder: Path) -> Callable[..., Path]:
    """Makes a good adapter for the base model, with these faults."""
    return lambda **faults: make_adapter(tmp_path / "a", base_folder, **faults)


def look(folder: Path, base_folder: Path | None) -> AdapterFacts:
    return inspect(folder, read_base_model(base_folder, "tiny"), 16)


def refusal(folder: Path, base_folder: Path | None) -> str:
    with pytest.raises(AdapterRefused) as caught:
        look(folder, base_folder)
    return str(caught.value)


def base_of(*weights: str, dtype: str = "F32", shape: tuple[int, ...] = (HIDDEN, HIDDEN)) -> BaseModel:
    return BaseModel("other", {name: Tensor(dtype, shape, 0, 0) for name in weights})


def test_good_adapter_says_what_it_is(tmp_path: Path, base_folder: Path) -> None:
    folder = make_adapter(tmp_path / "a", base_folder, rank=4)
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert look(folder, base_folder) == AdapterFacts(4, 16.0, ("q_proj", "v_proj"), size, str(base_folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"r": None}, "r is None; a rank is a whole number"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"r": "8"}, "r is '8'"),
        ({"r": 64}, "r is 64, this worker takes 16; start it with --max-lora-rank 64"),
        ({"rank_pattern": {"q_proj": 32}}, "rank_pattern of q_proj is 32, this worker takes 16"),
        ({"rank_pattern": [8]}, "rank_pattern is [8]"),
        ({"alpha_pattern": {"q_proj": 32}}, "alpha_pattern gives q_proj a scale of its own"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"bias": "all"}, "bias is 'all'"),
    ],
)
def test_config_that_vllm_cannot_serve(
    change: dict[str, Any], message: str, adapter: Callable[..., Path], base_folder: Path
) -> None:
    assert message in refusal(adapter(config=change), base_folder)


def test_alpha_pattern_that_changes_nothing_passes(adapter: Callable[..., Path], base_folder: Path) -> None:
    look(adapter(config={"alpha_pattern": {"q_proj": 16}}), base_folder)


def test_missing_files(tmp_path: Path, base_folder: Path) -> None:
    folder = make_adapter(tmp_path / "a", base_folder)
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "adapter_model.bin")
    assert "adapter_model.bin, which may contain code; save them as" in refusal(folder, base_folder)
    (folder / "adapter_model.bin").unlink()
    assert refusal(folder, base_folder) == "there is no adapter_model.safetensors"
    (folder / "adapter_config.json").unlink()
    assert "there is no adapter_config.json" in refusal(folder, base_folder)
    assert "there is no adapter_config.json" in refusal(tmp_path / "nowhere", base_folder)


# -- the weights file ------------------------------------------------------------------------------


def tensor(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape or [1, (end - begin) // 4], "data_offsets": [begin, end]}


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "adapter_config.json is empty"),
        ("  \n", "adapter_config.json is empty"),
        ("{", "adapter_config.json is not JSON"),
        ("[" * 100_000, "adapter_config.json is not JSON"),
        ("[]", "adapter_config.json is not a JSON object"),
        (" " * ((1 << 20) + 1), "more than 1048576 bytes"),
        (file_of([]), "its header is not an object"),
        (file_of({"x": {"dtype": "F32"}}), "tensor x has no dtype, shape and data_offsets"),
        (file_of({"x": tensor(0, 8)}, b"1234"), "is cut short: tensor x ends at"),
        (file_of({"x": tensor(0, 8)}, b"12345678extra"), "its tensors take"),
        (file_of({"x": tensor(0, 8), "y": tensor(4, 12)}, b"1" * 12), "tensor y starts at"),
        (file_of({"x": tensor(4, 8)}, b"1" * 8), "tensor x starts at"),
        (file_of({"x": tensor(8, 4, [1])}, b"1" * 8), "is cut short: tensor x"),
        (
            file_of({"x": tensor(0, 8, [1 << 62, 4])}, b"1" * 8),
            "declares F32 [4611686018427387904, 4] in 8 bytes",
        ),
        (file_of({"x": tensor(0, 8, [-1, -2])}, b"1" * 8), "has the shape [-1, -2]"),
        (file_of({"x": tensor(0, 8, [2.0])}, b"1" * 8), "has the shape [2.0]"),
        (file_of({"x": tensor(0, 8, [1] * 9 + [2])}, b"1" * 8), "has the shape [1, 1"),
        (file_of({"junk.weight": tensor(0, 8)}, b"1" * 8), "contains no LoRA tensors"),
        (b"", "has 0 bytes; it is empty or cut short"),
        (b"PK\x03\x04" + b"\0\xff" * 50, "is not a safetensors file: its header would have"),
        (struct.pack("<Q", 100_000_001) + b"{}", "its header would have 100000001 bytes"),
        (struct.pack("<Q", 1000) + b"{}", "a header of 1000 bytes in a file of 10"),
        (struct.pack("<Q", 2) + b"{]", "its header is not JSON"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "its header is not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) in range(9, 100) else "",
)
def test_broken_file(
    text: str | bytes, message: str, adapter: Callable[..., Path], base_folder: Path
) -> None:
    """A text is that of the config, bytes are those of the weights."""
    folder = adapter()
    if isinstance(text, str):
        (folder / "adapter_config.json").write_text(text)
    else:
        (folder / "adapter_model.safetensors").write_bytes(text)
    assert message in refusal(folder, base_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{Q0}.lora_B.weight": None}, "layers.0.self_attn.q_proj has only lora_A"),
        ({f"{Q0}.lora_A.weight": None}, "layers.0.self_attn.q_proj has only lora_B"),
        ({f"{Q0}.lora_A.weight": np.zeros((8, 16), np.float32)}, "32 x 16; the base model tiny has 32 x 32"),
        ({f"{Q0}.lora_B.weight": np.zeros((64, 8), np.float32)}, "64 x 32; the base model tiny has 32 x 32"),
        ({f"{Q0}.lora_A.weight": np.zeros((4, 32), np.float32)}, "lora_A has rank 4, lora_B 8"),
        (
            {
                f"{Q0}.lora_A.weight": np.zeros((4, 32), np.float32),
                f"{Q0}.lora_B.weight": np.zeros((32, 4), np.float32),
            },
            "has rank 4, the adapter r = 8",
        ),
        ({f"{Q0}.lora_A.weight": np.zeros((8, 32, 1), np.float32)}, "are not matrices"),
        ({f"{Q0}.lora_A.weight": np.zeros((8, 32), np.int32)}, "is of type I32; use one of F64, F32"),
    ],
)
def test_tensors_that_do_not_fit(
    change: dict[str, Any], message: str, adapter: Callable[..., Path], base_folder: Path
) -> None:
    assert message in refusal(adapter(tensors=change), base_folder)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (np.float32, np.nan),
        (np.float32, np.inf),
        (np.float32, -np.inf),
        (np.float16, np.nan),
        (np.float64, np.inf),
        (np.uint16, 0x7FC0),  # bfloat16: NaN
        (np.uint16, 0xFF80),  # bfloat16: -inf
    ],
)
def test_nan_and_infinity_are_refused(
    dtype: Any, bad: Any, adapter: Callable[..., Path], base_folder: Path
) -> None:
    values = np.ones((8, HIDDEN), dtype)
    values[-1, -1] = bad
    folder = adapter(tensors={f"{Q0}.lora_A.weight": values})
    assert f"tensor {Q0}.lora_A.weight contains NaN or an infinity" in refusal(folder, base_folder)


def test_large_numbers_pass(adapter: Callable[..., Path], base_folder: Path) -> None:
    largest_bfloat16 = np.uint16(0x7F7F)
    for largest in (np.finfo(np.float32).max, np.finfo(np.float16).max, largest_bfloat16):
        look(adapter(tensors={f"{Q0}.lora_A.weight": np.full((8, HIDDEN), largest)}), base_folder)


def test_every_chunk_is_looked_at(tmp_path: Path) -> None:
    for index in range(9):
        values = np.zeros(9, np.float32)
        values[index] = np.nan
        write_safetensors(tmp_path / "f", {"a": np.zeros(3, np.float64), "x": values})
        assert first_not_finite(tmp_path / "f", read_header(tmp_path / "f"), chunk_bytes=16) == "x"


# -- the base model --------------------------------------------------------------------------------


def test_other_base_model_is_named(tmp_path: Path, base_folder: Path) -> None:
    shapes = {"model.layers.7.self_attn.q_proj.weight": (HIDDEN, HIDDEN)}
    folder = make_adapter(tmp_path / "a", base_folder, config={"base_model_name_or_path": "org/bigger"})
    write_safetensors(folder / "adapter_model.safetensors", lora_arrays(shapes, 8, 1, 1, ["q_proj"]))
    assert refusal(folder, base_folder) == (
        "module model.layers.7.self_attn.q_proj is not in the base model tiny; "
        "the adapter says it was made for org/bigger"
    )


def test_embeddings_and_head(tmp_path: Path, base_folder: Path) -> None:
    name = "base_model.model.model.embed_tokens.lora_embedding"
    good = {
        f"{name}_A": np.zeros((8, VOCAB), np.float32),
        f"{name}_B": np.zeros((HIDDEN, 8), np.float32),
    }
    folder = make_adapter(tmp_path / "a", base_folder, targets=["q_proj", "lm_head"], tensors=good)
    assert look(folder, base_folder).modules == ("embed_tokens", "lm_head", "q_proj")
    bad = good | {f"{name}_A": np.zeros((8, VOCAB + 1), np.float32)}
    assert "embed_tokens is for a weight of 51 x 32; the base model tiny has 50 x 32" in refusal(
        make_adapter(tmp_path / "b", base_folder, tensors=bad), base_folder
    )


def test_tied_head_has_the_shape_of_the_embeddings() -> None:
    assert base_of("model.embed_tokens.weight").shapes("lm_head") == [(HIDDEN, HIDDEN)]


@pytest.mark.parametrize(
    ("weight", "module"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj"),
        ("h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn"),
        ("language_model.lm_head.weight", "lm_head"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.3.up_proj"),
    ],
)
def test_prefix_before_the_layers_does_not_matter_but_layer_and_module_do(weight: str, module: str) -> None:
    base = base_of(weight, shape=(3, 5))
    assert base.shapes(module) == [(3, 5)]
    for other in (
        "model.layers.1.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.up_proj",
        "odd",
    ):
        assert base.shapes(other) == []


def test_two_towers_with_layers_of_the_same_names() -> None:
    base = BaseModel(
        "llava",
        {
            "vision_tower.encoder.layers.0.self_attn.q_proj.weight": Tensor("F16", (3, 3), 0, 0),
            "language_model.model.layers.0.self_attn.q_proj.weight": Tensor("F16", (5, 5), 0, 0),
        },
    )
    assert base.shapes("model.layers.0.self_attn.q_proj") == [(3, 3), (5, 5)]
    assert base.shapes("language_model.model.layers.0.self_attn.q_proj") == [(5, 5)]


@pytest.mark.parametrize(
    "base",
    [
        base_of("model.layers.0.self_attn.q_proj.qweight", "model.layers.0.self_attn.q_proj.scales"),
        base_of("model.layers.0.self_attn.q_proj.weight", dtype="U8"),
        base_of("model.layers.0.self_attn.q_proj.weight", shape=(4, 32, 32)),
        base_of("model.layers.0.self_attn.qkv_proj.weight"),
        BaseModel("shard missing", {"model.layers.0.self_attn.q_proj.weight": None}),
    ],
    ids=["gptq", "bitsandbytes", "3-D", "fused", "missing shard"],
)
def test_shape_that_cannot_be_told_is_left_to_vllm(base: BaseModel) -> None:
    assert base.shapes("model.layers.0.self_attn.q_proj") == [None]


def test_fp8_weight_beside_its_scale_has_a_shape() -> None:
    tensors = {
        "model.layers.0.self_attn.q_proj.weight_scale": Tensor("F32", (32, 1), 0, 0),
        "model.layers.0.self_attn.q_proj.weight": Tensor("F8_E4M3", (32, 16), 0, 0),
    }
    assert BaseModel("fp8", tensors).shapes("model.layers.0.self_attn.q_proj") == [(32, 16)]


@pytest.mark.parametrize(
    "weight", ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.0.up_proj.weight"]
)
def test_fused_experts_are_left_to_vllm(weight: str, tmp_path: Path, base_folder: Path) -> None:
    folder = make_adapter(tmp_path / "a", base_folder)
    module = "base_model.model.model.layers.0.mlp.experts"
    arrays = {
        f"{module}{part}.lora_{kind}.weight": np.zeros(shape, np.float32)
        for part in ("", ".base_layer")
        for kind, shape in {"A": (64, 32), "B": (32, 64)}.items()
    }
    write_safetensors(folder / "adapter_model.safetensors", arrays)
    assert inspect(folder, base_of(weight), 16).rank == 8


def test_transposed_weights_fit_when_the_config_says_so(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    write_safetensors(base / "model.safetensors", {"h.0.c_attn.weight": np.zeros((32, 96), np.float32)})
    arrays = lora_arrays({"transformer.h.0.c_attn.weight": (96, 32)}, 8, 1, 1, ["c_attn"])
    for transposed in (True, False):
        folder = make_adapter(tmp_path / "a", base, config={"fan_in_fan_out": transposed})
        write_safetensors(folder / "adapter_model.safetensors", arrays)
        if transposed:
            look(folder, base)
        else:
            assert "weight of 96 x 32" in refusal(folder, base)


def split(base_folder: Path) -> None:
    """The same base model in two files and an index."""
    whole = base_folder / "model.safetensors"
    header, data = read_safetensors(whole)
    names = list(header)
    places = {}
    for number, part in enumerate((names[:3], names[3:])):
        shard = f"model-{number}.safetensors"
        arrays = {}
        for name in part:
            begin, end = header[name]["data_offsets"]
            kind = np.float64 if header[name]["dtype"] == "F64" else np.float32
            arrays[name] = np.frombuffer(data[begin:end], kind).reshape(header[name]["shape"])
            places[name] = shard
        write_safetensors(base_folder / shard, arrays)
    whole.unlink()
    (base_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_base_model_in_shards(tmp_path: Path, base_folder: Path) -> None:
    folder = make_adapter(tmp_path / "a", base_folder)
    wrong = make_adapter(
        tmp_path / "b", base_folder, tensors={f"{Q0}.lora_A.weight": np.zeros((8, 16), np.float32)}
    )
    split(base_folder)
    look(folder, base_folder)
    assert "weight of 32 x 16" in refusal(wrong, base_folder)


@pytest.mark.parametrize(
    ("weights", "index"),
    [(None, None), (b"short", None), (None, "{")],
    ids=["none", "broken", "broken index"],
)
def test_base_model_that_cannot_be_read_is_not_compared_with(
    weights: bytes | None,
    index: str | None,
    adapter: Callable[..., Path],
    base_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = adapter(tensors={f"{Q0}.lora_A.weight": np.zeros((8, 16), np.float32)})
    (base_folder / "model.safetensors").unlink()
    if weights is not None:
        (base_folder / "model.safetensors").write_bytes(weights)
    if index is not None:
        (base_folder / "model.safetensors.index.json").write_text(index)
    with caplog.at_level("INFO"):
        look(folder, base_folder)
    assert [record.message for record in caplog.records if "are not compared with tiny" in record.message]
