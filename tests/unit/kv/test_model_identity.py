"""What a KV cache on disk depends on: all of that changes its identity, and nothing else does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dynamo_vllm.kv import model_identity
from dynamo_vllm.kv.model_identity import identity, this_machine

MACHINE: dict[str, object] = {"packages": {"vllm": "1.0", "torch": "2.0"}, "gpus": ["H200"], "cpu": {}}
FLAGS: dict[str, str | None] = {"dtype": "bfloat16", "block_size": "16", "enforce_eager": None}
COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "extra").mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "model-1.safetensors").write_bytes(bytes(100))
    (folder / "extra" / "code.py").write_text("pass")
    return folder


def of(
    model: Path | str,
    flags: dict[str, str | None] = FLAGS,
    variables: dict[str, str] | None = None,
    machine: dict[str, object] = MACHINE,
) -> str:
    return identity(str(model), flags, variables or {}, machine=machine)


def test_it_is_the_same_again(model: Path) -> None:
    assert of(model) == of(model) == of(model, dict(reversed(FLAGS.items())))
    assert len(of(model)) == 64 and int(of(model), 16)


def test_a_copy_is_another_model_and_a_moved_folder_is_the_same(model: Path, tmp_path: Path) -> None:
    before = of(model)
    assert of(shutil.copytree(model, tmp_path / "copy")) != before  # even with the times of the first
    os.rename(model, tmp_path / "moved")
    assert of(tmp_path / "moved") == before


@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json", "extra/code.py"])
def test_other_files_are_another_model(model: Path, name: str) -> None:
    before, path = of(model), model / name
    data, about = path.read_bytes(), path.stat()
    seen = {before}
    path.write_bytes(bytes(len(data)))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # the same size and time
    seen.add(of(model))
    path.write_bytes(data + b" ")
    seen.add(of(model))
    os.utime(path, ns=(1, 1))
    seen.add(of(model))
    path.rename(path.with_name("other"))
    seen.add(of(model))
    assert len(seen) == 5


def test_a_new_file_is_another_model_but_not_what_tools_leave(model: Path) -> None:
    before = of(model)
    (model / "__pycache__").mkdir()
    (model / ".lock").touch()
    assert of(model) == before
    (model / "model-2.safetensors").touch()
    assert of(model) != before


def test_links_are_followed(model: Path, tmp_path: Path) -> None:
    """As in the cache of a hub, whose folders contain links to files named by their hashes."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in model.glob("*.*"):
        (snapshot / path.name).symlink_to(path)
    before = of(snapshot)
    (model / "model-1.safetensors").write_bytes(bytes(101))
    assert of(snapshot) != before


def test_a_file_is_a_model_too(model: Path) -> None:
    path = model / "model-1.safetensors"
    before = of(path)
    assert of(path) == before
    path.write_bytes(bytes(101))
    assert of(path) != before


def test_a_model_of_a_hub_is_known_by_its_commit(model: Path) -> None:
    fixed = {**FLAGS, "revision": COMMIT}
    assert of("org/name", fixed) == of("org/name", fixed)
    assert of("org/name", fixed) != of("org/other", fixed)
    assert of("org/name", fixed) != of("org/name", {**FLAGS, "revision": COMMIT[::-1]})
    for revision in ("main", None):  # what that is may change
        flags = {**FLAGS, "revision": revision}
        assert of("org/name", flags) != of("org/name", flags)
    assert of("org/name") != of("org/name")


def test_flags_that_may_change_values_change_it(model: Path) -> None:
    """Some models choose their rotary embedding by their length."""
    flags = """dtype block_size kv_cache_dtype quantization max_model_len hf_overrides compilation_config
        revision tensor_parallel_size pipeline_parallel_size attention_backend attention_config
        speculative_config prefix_caching_hash_algo mm_processor_kwargs load_format seed"""
    switches = ("enable_expert_parallel", "a_flag_of_a_later_version", "no_enable_chunked_prefill")
    plain = of(model)
    for name, value in [*dict.fromkeys(flags.split(), "7").items(), *dict.fromkeys(switches).items()]:
        assert of(model, {**FLAGS, name: value}) != plain, name
    for name in FLAGS:
        assert of(model, {flag: value for flag, value in FLAGS.items() if flag != name}) != plain, name


def test_harmless_flags_do_not(model: Path) -> None:
    names = """served_model_name gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override
        max_num_seqs max_num_batched_tokens kv_transfer_config kv_events_config data_parallel_rank
        data_parallel_rpc_port master_port disable_log_stats no_enable_log_requests hf_token tokenizer
        otlp_traces_endpoint"""
    for name in names.split():
        assert of(model, {**FLAGS, name: "1"}) == of(model), name


def test_files_that_flags_name_belong_to_it(model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "weights").touch()
    flags = {**FLAGS, "speculative_config": f'{{"model": "{draft}"}}'}
    before = of(model, flags)
    assert of(model, flags) == before
    (draft / "weights").write_text("new")
    assert of(model, flags) != before


def test_adapters_make_it_a_new_one_each_time(model: Path) -> None:
    """vLLM's keys have the name of an adapter, which may have other weights in the next process."""
    for name in ("enable_lora", "lora_modules", "default_mm_loras"):
        assert of(model, {**FLAGS, name: None}) != of(model, {**FLAGS, name: None}), name


def test_variables_that_choose_kernels_change_it_and_others_do_not(model: Path) -> None:
    kernels = """VLLM_ATTENTION_BACKEND VLLM_KV_CACHE_LAYOUT VLLM_BATCH_INVARIANT VLLM_USE_DEEP_GEMM
        VLLM_MODEL_REDIRECT_PATH VLLM_TUNED_CONFIG_FOLDER VLLM_OF_A_LATER_VERSION FLASHINFER_DISABLE
        NVIDIA_TF32_OVERRIDE"""
    plain = of(model)
    for name in kernels.split():
        assert len({plain, of(model, variables={name: "1"}), of(model, variables={name: "2"})}) == 3, name
    others = """VLLM_HOST_IP VLLM_PORT VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_LOGGING_LEVEL VLLM_API_KEY
        VLLM_NO_USAGE_STATS VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_RPC_BASE_PATH
        VLLM_ENGINE_READY_TIMEOUT_S TRITON_CACHE_DIR HOME DYN_NAMESPACE"""
    for name in others.split():
        assert of(model, variables={name: "1"}) == plain, name


def test_another_version_or_machine_changes_it(model: Path) -> None:
    machines: list[dict[str, object]] = [
        {"packages": {"vllm": "1.1", "torch": "2.0"}},
        {"packages": {"vllm": "1.0", "torch": "2.1"}},
        {"gpus": ["H100"]},
        {"cpu": {"flags": "avx512"}},
    ]
    assert len({of(model), *(of(model, machine={**MACHINE, **changed}) for changed in machines)}) == 5


def test_a_machine_is_known_by_what_computes(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor : 0\nmodel name : Fast\ncpu MHz : 1234\nflags : fpu avx2\n\nprocessor : 1\nflags : odd\n"
    )
    for number, name in enumerate(("H200", "H200", "L4")):
        folder = tmp_path / "driver" / "nvidia" / "gpus" / str(number)
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t NVIDIA {name}\nIRQ: 7{number}\nGPU UUID: {number}\n")
    (tmp_path / "driver" / "nvidia" / "version").write_text("NVRM version: 580\nGCC version: 12\n")
    found = this_machine(str(tmp_path))
    assert found["cpu"] == {"model name": "Fast", "flags": "fpu avx2"}
    assert found["gpus"] == ["Model: \t NVIDIA H200", "Model: \t NVIDIA L4"]
    assert found["driver"] == "NVRM version: 580"


def test_another_version_of_ours_is_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its patches and defaults may be others."""
    before = this_machine()
    assert this_machine() == before and before["packages"]
    monkeypatch.setattr(model_identity, "__version__", "0.0.1")
    assert this_machine() != before
