"""Memory per GPU: weights of ranks, caches per token, and which layouts fit."""

from __future__ import annotations

import dataclasses

import pytest

from dynamo_vllm.config.options.size import CACHE_DTYPES, DTYPES, QUANTISATIONS
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing import families, formats, gpus, layouts, memory
from dynamo_vllm.sizing.formats import WeightFormat
from dynamo_vllm.sizing.gpus import GIB, Gpu
from dynamo_vllm.sizing.memory import EngineLoad, Layout
from dynamo_vllm.sizing.parts import Model, Part
from unit.sizing.test_parameters import config

H200 = Gpu("H200", 139.8)
PLAIN = EngineLoad(reserve_gib=4)


def read(name: str, **options: str) -> tuple[Model, WeightFormat]:
    found = config(name)
    return families.read(found, name), formats.of(
        found, name, options.get("dtype"), options.get("quantisation")
    )


# --- caches ---------------------------------------------------------------------------------------------


def test_a_token_takes_its_heads_or_its_latent_in_every_layer() -> None:
    for name, dtype, size in (
        ("llama-3.1-8b", "auto", 2 * 32 * 8 * 128 * 2),
        ("llama-3.1-8b", "fp8", 2 * 32 * 8 * 128),
        ("qwen3-8b", "auto", 2 * 36 * 8 * 128 * 2),
        ("deepseek-r1", "auto", 61 * (512 + 64) * 2),
        ("gpt-oss-120b", "auto", 2 * 36 * 8 * 64 * 2),
    ):
        model, form = read(name)
        assert memory.token_bytes(model.layers, memory.cache_value_bytes(form, dtype)) == size


def test_shards_share_heads_but_never_cut_one_and_each_has_the_latent() -> None:
    llama, _ = read("llama-3.1-8b")
    whole = memory.token_bytes(llama.layers, 2)
    assert [whole // memory.token_bytes(llama.layers, 2, tp) for tp in (1, 2, 8, 16)] == [1, 2, 8, 8]
    latent, _ = read("deepseek-r1")
    assert memory.token_bytes(latent.layers, 2, 8) == memory.token_bytes(latent.layers, 2)


def test_layers_with_a_window_keep_no_more_than_it_and_what_steps_add() -> None:
    model, _ = read("gpt-oss-20b")
    full = memory.request_bytes(memory.without_windows(model), 2, 1, 131072, 16384)
    windowed = memory.request_bytes(model.layers, 2, 1, 131072, 16384)
    kept = -(-(128 - 1 + 16384) // 16) + 1
    assert full == 131072 * 24 * 2 * 8 * 64 * 2
    assert windowed == (131072 + kept * 16) * 12 * 2 * 8 * 64 * 2
    assert memory.request_bytes(model.layers, 2, 1, 100, 16384) == 112 * 24 * 2 * 8 * 64 * 2


# --- weights --------------------------------------------------------------------------------------------


def test_shards_share_matrices_and_have_norms_each() -> None:
    model, form = read("llama-3.1-8b")
    (one,), (eight,) = (memory.rank_bytes(model, form, Layout(tp=tp)) for tp in (1, 8))
    norms = 2 * (32 * 2 + 1) * 4096
    assert one == model.total * 2
    assert eight - norms == pytest.approx((one - norms) / 8)


def test_more_shards_than_kv_heads_have_copies_of_them() -> None:
    model, form = read("qwen3-30b-a3b")
    (four,), (eight,) = (memory.rank_bytes(model, form, Layout(tp=tp)) for tp in (4, 8))
    keys_and_values = 48 * 2 * 4 * 128 * 2048 * 2
    assert eight > four / 2 + keys_and_values / 8 - 2**20


def bytes_of(part: Part, model: Model, form: WeightFormat) -> float:
    weights = (weight for layer in model.layers for weight in layer.weights)
    return sum(form.bytes_of(weight) for weight in weights if weight.part is part)


def test_data_parallel_ranks_share_experts_and_have_the_rest_each() -> None:
    model, form = read("deepseek-r1")
    (one,), (eight,) = (memory.rank_bytes(model, form, Layout(dp=dp, ep=dp > 1)) for dp in (1, 8))
    assert one - eight == pytest.approx(bytes_of(Part.EXPERTS, model, form) * 7 / 8, abs=16)


def test_experts_that_do_not_divide_leave_one_more_on_some_gpu() -> None:
    model, form = read("qwen1.5-moe-a2.7b")
    (whole,), (sliced,) = (memory.rank_bytes(model, form, Layout(dp=8, ep=ep)) for ep in (True, False))
    experts = model.by_part()[Part.EXPERTS] * 2
    assert whole - sliced == pytest.approx(experts * (8 / 60 - 1 / 8), abs=16)


def test_experts_in_mxfp4_are_filled_up_as_kernels_do() -> None:
    model, form = read("gpt-oss-120b")
    # "Model loading took 65.9651 GiB" with Marlin on an H100, in vllm-project/vllm issue 23278.
    assert memory.rank_bytes(model, form, Layout())[0] / GIB == pytest.approx(65.9651, rel=0.002)
    (two,) = memory.rank_bytes(model, form, Layout(tp=2))
    experts = 36 * 128 * 3 * 3072 * 1536 * (0.5 + 1 / 32)
    assert two == pytest.approx(experts + (memory.weight_bytes(model, form) - 56.757 * GIB) / 2, rel=0.01)


def test_weights_of_a_rank_are_those_of_published_logs() -> None:
    """What vLLM's line "Model loading took" says in logs of others."""
    for name, layout, logged in (("qwen3-8b", Layout(), 15.27), ("deepseek-r1", Layout(tp=8), 79.41)):
        model, form = read(name)
        assert memory.rank_bytes(model, form, layout)[0] / GIB == pytest.approx(logged, rel=0.002)


def test_the_copies_vllm_makes_of_mla_are_counted() -> None:
    model, form = read("deepseek-r1")
    copies = 61 * 512 * 128 * (128 + 128) * 2
    assert sum(memory.rank_bytes(model, form, Layout())) - memory.weight_bytes(model, form) == copies


def test_stages_get_layers_as_vllm_shares_them_out() -> None:
    assert memory.stages(61, 4) == [15, 15, 16, 15]
    assert memory.stages(62, 4) == [15, 16, 16, 15]
    assert memory.stages(8, 2) == [4, 4]


def test_stages_hold_all_weights_once_and_a_tied_table_twice() -> None:
    model, form = read("qwen3-0.6b")
    table = 151936 * 1024 * 2
    assert sum(memory.rank_bytes(model, form, Layout(pp=4))) == model.total * 2 + table
    untied, form = read("qwen3-8b")
    assert sum(memory.rank_bytes(untied, form, Layout(pp=4))) == untied.total * 2


# --- formats --------------------------------------------------------------------------------------------


def compressed(**weights: object) -> dict[str, object]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("written", "name", "size"),
    [
        ({"quant_method": "fp8"}, "fp8", 1.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block", 1.0 + 4 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4", 0.5 + 2.5 / 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb4", 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb8", 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5625),
        (compressed(num_bits=8, type="float"), "fp8", 1.0),
        (compressed(num_bits=4, type="int", group_size=64), "int4", 0.5 + 2.5 / 64),
    ],
)
def test_quantisation_is_read_from_the_file(written: dict[str, object], name: str, size: float) -> None:
    form = formats.of({**config("qwen3-8b"), "quantization_config": written}, "c", None, None)
    assert form.quantisation == name
    assert form.linear_bytes == pytest.approx(size)


def test_quantisation_that_is_not_known_is_refused() -> None:
    for written, said in (
        ({"quant_method": "exl2"}, "quant_method 'exl2' is not known here"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits is not known here"),
        ({"quant_method": "compressed-tensors"}, "config_groups without weights"),
        ({}, "quant_method is missing"),
    ):
        with pytest.raises(ConfigError, match=said):
            formats.of({**config("qwen3-8b"), "quantization_config": written}, "c", None, None)


INT4 = compressed(num_bits=4, type="int", group_size=32)


@pytest.mark.parametrize(
    ("ignored", "are_experts_alone"),
    [
        (["lm_head"], False),
        (["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"], True),
        (["model.layers.0.self_attn.q_proj"], False),
        ([f"model.layers.{number}.self_attn*" for number in range(61)], True),
        (["model.layers.*.self_attn"], True),
    ],
)
def test_attention_that_a_file_leaves_out_is_not_quantised(
    ignored: list[str], are_experts_alone: bool
) -> None:
    found = {**config("deepseek-r1"), "quantization_config": {**INT4, "ignore": ignored}}
    model, form = families.read(found, "c"), formats.of(found, "c", None, None)
    assert form.experts_only is are_experts_alone
    attention = bytes_of(Part.ATTENTION, model, form)
    per_value = 2 if are_experts_alone else 0.5 + 2.5 / 32
    assert attention == pytest.approx(model.by_part()[Part.ATTENTION] * per_value)
    assert memory.refusal(model, form, Layout(tp=8)) is None


def test_what_is_never_quantised_and_what_always_is() -> None:
    written = {**INT4, "ignore": ["re:.*self_attn.*"]}
    form = formats.of({**config("qwen3-8b"), "quantization_config": written}, "c", None, None)
    assert not form.experts_only, "there are none"
    model, form = read("qwen2.5-vl-7b", quantisation="int4")
    assert sum(form.bytes_of(weight) for weight in model.vision) == 2 * model.by_part()[Part.VISION]
    model, form = read("qwen3-8b", quantisation="int4")
    plain = 2 * (2 * 151936 * 4096 + (36 * 2 + 1) * 4096 + 36 * 256)
    linear = model.total - plain // 2
    weights = memory.weight_bytes(model, form)
    assert weights == pytest.approx(plain + linear * (0.5 + 2.5 / 128)), "not tables, heads and norms"


def test_kv_heads_that_neither_divide_nor_repeat_are_refused() -> None:
    odd = {**config("qwen3-8b"), "num_attention_heads": 24, "num_key_value_heads": 6}
    assert memory.refusal(families.read(odd, "odd"), WeightFormat(), Layout(tp=2)) is None
    assert memory.refusal(families.read(odd, "odd"), WeightFormat(), Layout(tp=4)) == (
        "6 KV heads and 4 ranks do not divide"
    )


def test_every_choice_of_the_command_has_bytes() -> None:
    assert set(DTYPES) == set(formats.DTYPES)
    assert set(CACHE_DTYPES) == set(formats.CACHE_DTYPES)
    for name in QUANTISATIONS:
        assert formats.of({}, "c", "bfloat16", name).linear_bytes > 0


def test_float32_files_run_in_sixteen_bits_unless_asked() -> None:
    found = {**config("qwen3-8b"), "torch_dtype": "float32"}
    assert formats.of(found, "c", None, None).value_bytes == 2
    assert formats.of(found, "c", "float32", None).value_bytes == 4


# --- GPUs and layouts -----------------------------------------------------------------------------------


def test_gpus_are_understood_or_refused_by_name() -> None:
    for text, understood in {
        "16xH200": (16, "H200", 139.8),
        "h100": (1, "H100", 79.1),
        "8 x H100:80": (8, "H100", 80.0),
        "2xNEW:96.5": (2, "NEW", 96.5),
        "4xA100-80GB": (4, "A100", 79.2),
    }.items():
        found = gpus.read(text)
        assert (found.count, found.gpu.name, found.gpu.gib) == understood
    for text, said in {
        "8xZ9": "its memory is not known here; write Z9:GIB",
        "0xH100": "0 GPUs hold nothing",
        "8*H100": "is not understood",
        "8xZ9:0": "'0' is not a size in GiB",
        "": "is not understood",
    }.items():
        with pytest.raises(ConfigError, match=said):
            gpus.read(text)


def test_room_is_what_weights_and_reserve_leave() -> None:
    model, form = read("qwen3-8b")
    load = EngineLoad(reserve_gib=4, utilisation=0.9, max_len=8192, average_len=2048)
    need = memory.need(model, form, Layout(), H200, load)
    assert need.room == int(139.8 * GIB * 0.9) - 2 * model.total - 4 * GIB
    per_token = 2 * 36 * 8 * 128 * 2
    assert need.requests_of_max_len == pytest.approx(need.room / per_token / 8192)
    assert need.requests_of_average_len == pytest.approx(need.room / per_token / 2048)
    assert need.tokens == pytest.approx(need.room / per_token, abs=8192)
    assert need.fits


@pytest.mark.parametrize(
    ("name", "layout", "load", "said"),
    [
        ("deepseek-r1", Layout(), PLAIN, "too big by"),
        ("llama-3.1-70b", Layout(), PLAIN, "too big by 6.8 GiB per GPU"),
        ("qwen3-8b", Layout(tp=3), PLAIN, "32 attention heads do not divide by 3"),
        ("qwen2.5-7b", Layout(tp=8), PLAIN, "28 attention heads do not divide by 8"),
        ("qwen3-8b", Layout(pp=40), PLAIN, "36 layers are fewer than 40 stages"),
        ("qwen3-8b", Layout(tp=2, ep=True), PLAIN, "there are no experts to share out"),
        ("gpt-oss-20b", Layout(dp=64, ep=True), PLAIN, "32 experts are fewer than 64 ranks"),
        ("deepseek-r1", Layout(dp=32), PLAIN, "an MLP of 2048 does not divide by 32 in blocks of 128"),
        ("qwen3-8b", Layout(), dataclasses.replace(PLAIN, concurrency=10_000), "requests at once, not 10000"),
        ("qwen3-8b", Layout(), dataclasses.replace(PLAIN, max_len=10**6), "lower --max-model-len"),
    ],
)
def test_what_does_not_fit_says_why(name: str, layout: Layout, load: EngineLoad, said: str) -> None:
    model, form = read(name)
    need = memory.need(model, form, layout, H200, load)
    assert not need.fits
    assert said in str(need.problem)


def test_layouts_come_with_the_fewest_gpus_first_and_all_fit() -> None:
    model, form = read("deepseek-r1")
    found = layouts.search(model, form, H200, 16, EngineLoad(max_len=16384)).fits
    sizes = [need.layout.gpus for need in found]
    assert sizes == sorted(sizes)
    assert sizes[0] == 8
    assert found[0].layout == Layout(dp=8, ep=True)
    assert all(need.fits and need.requests_of_max_len >= 1 for need in found)
    assert any(need.layout.nodes == 2 for need in found)
    assert all(need.layout.tp <= need.layout.gpus_per_node for need in found)


def test_layouts_keep_to_the_nodes_there_are() -> None:
    model, form = read("deepseek-r1")
    found = layouts.search(model, form, H200, 16, EngineLoad(max_len=16384), per_node=4).fits
    assert {(need.layout.gpus, need.layout.nodes) for need in found} == {(8, 2), (16, 4)}
    assert max(need.layout.tp for need in found) == 4
    uneven = layouts.search(model, form, H200, 18, EngineLoad(max_len=16384), per_node=6).fits
    assert {(need.layout.gpus, need.layout.nodes) for need in uneven} == {(8, 2)}


def test_a_dense_model_gets_no_data_parallel_ranks() -> None:
    model, form = read("llama-3.1-70b")
    found = layouts.search(model, form, H200, 8, EngineLoad(max_len=8192)).fits
    assert found[0].layout == Layout(tp=2)
    assert {need.layout.dp for need in found} == {1}


def test_nothing_that_fits_names_the_nearest() -> None:
    model, form = read("deepseek-r1")
    found = layouts.search(model, form, Gpu("L4", 22), 8, EngineLoad(max_len=4096))
    assert not found.fits
    assert found.nearest is not None
    assert "too big by" in str(found.nearest.problem)
    assert layouts.smallest(model, form, Gpu("X", 1), EngineLoad(max_len=4096)) is None


def test_flags_say_the_layout() -> None:
    for layout, flags in (
        (Layout(), ""),
        (Layout(tp=4), "--tensor-parallel-size 4"),
        (Layout(tp=8, pp=2, nodes=2), "--tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2"),
        (Layout(dp=8, ep=True), "--data-parallel-size 8 --enable-expert-parallel"),
        (
            Layout(dp=8, ep=True, nodes=2),
            "--data-parallel-size 8 --data-parallel-size-local 4 --enable-expert-parallel",
        ),
    ):
        assert " ".join(layouts.flags(layout)) == flags


def test_the_estimate_grows_with_the_step_and_shrinks_without_graphs() -> None:
    model, form = read("qwen3-8b")

    def reserve(**load: object) -> int:
        return memory.need(model, form, Layout(), H200, EngineLoad(**load)).reserve  # type: ignore[arg-type]

    assert reserve(max_batched_tokens=16384) > reserve(max_batched_tokens=2048)
    assert reserve(max_seqs=1024) > reserve(max_seqs=128)
    assert reserve() - reserve(eager=True) == GIB
    assert 2 * GIB < reserve() < 8 * GIB


def test_encoder_has_no_cache_and_as_many_requests_as_the_scheduler_takes() -> None:
    """Nor logits: a classifier's head is small."""
    model, _ = read("bge-reranker-v2-m3")
    assert not model.has_cache and model.max_len == 8192
    found = memory.need(model, WeightFormat("float16"), Layout(), H200, EngineLoad(max_seqs=64))
    assert found.fits and (found.requests_of_max_len, found.tokens, found.cache_per_token) == (64, 0, 0)


def test_sound_is_part_of_a_request_of_whisper() -> None:
    model, _ = read("whisper-large-v3-turbo")
    assert model.max_len == 1500 + 448
    assert memory.token_bytes(model.layers, 2) == 4 * 2 * 1280 * 2  # keys and values in four layers
