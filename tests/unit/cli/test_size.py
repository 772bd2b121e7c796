"""`dynamo-vllm size` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_vllm.cli import main, size
from unit.sizing.test_parameters import R1, RECIPES

Captured = pytest.CaptureFixture[str]

QWEN = RECIPES / "qwen3-single-gpu" / "model"


def said(capsys: Captured, *argv: str) -> str:
    size.main(list(argv))
    return capsys.readouterr().out


def test_a_model_alone_gets_its_parts_and_the_fewest_gpus(capsys: Captured) -> None:
    found = said(capsys, str(RECIPES / "gpt-oss" / "120b"))
    assert "116.83 B parameters, 5.71 B active per token" in found
    assert "36.0 KiB per token in bfloat16 in 18 layers; the other 18 keep" in found
    assert "L40S      2  --pipeline-parallel-size 2" in found


def test_a_layout_gets_its_room_and_flags(capsys: Captured) -> None:
    found = said(capsys, str(QWEN), "--gpus", "2xL40S", "--tp", "2", "--max-model-len", "8192")
    assert "layout    tensor parallel 2 = 2 GPUs" in found
    assert "fits      yes" in found
    assert found.splitlines()[-1] == "flags     --tensor-parallel-size 2 --max-model-len 8192"


def test_tiers_get_their_tokens(capsys: Captured) -> None:
    asked = ("--kv-offload-gb", "64", "--kv-offload-disk", "/mnt/kv:500")
    line = said(capsys, str(QWEN), *asked).splitlines()[-1]
    # 144 KiB are 147456 bytes.
    assert line == (
        "tiers     64 GB of host memory hold 434,027 tokens, 500 GB of disk hold 3,390,842 tokens: "
        "144.0 KiB per token, 0.6 GB to load for a prompt of 4,096"
    )
    plain = said(capsys, str(QWEN), "--kv-offload-disk", "500", "--brief")
    assert plain.splitlines()[-1].startswith("tiers     500 GB of disk hold 3,390,842 tokens")
    found = json.loads(said(capsys, str(QWEN), *asked, "--json"))["tiers"]
    assert found == {"bytes_per_token": 147456, "tokens": {"host memory": 434027, "disk": 3390842}}


def test_tiers_hold_what_each_shard_has_and_a_latent_once(capsys: Captured) -> None:
    # 8 KV heads on 16 shards: each is there twice.
    found = said(capsys, str(QWEN), "--gpus", "16xL40S", "--tp", "16", "--kv-offload-gb", "64")
    assert "288.0 KiB per token of all shards" in found.splitlines()[-1]
    found = said(capsys, str(R1), "--gpus", "8xH200", "--tp", "8", "--kv-offload-gb", "64")
    assert "68.6 KiB per token of all shards" in found.splitlines()[-1]
    assert "tiers" not in said(capsys, str(QWEN))


def test_an_encoder_has_no_cache(capsys: Captured) -> None:
    ranker = str(Path(__file__).parents[1] / "sizing" / "models" / "bge-reranker-v2-m3.json")
    found = said(capsys, ranker, "--gpus", "1xL4", "--tp", "1", "--max-num-seqs", "64")
    assert "KV cache  none: an encoder keeps nothing of a text" in found
    assert "fits      yes, with 64 requests at once (--max-num-seqs)" in found
    assert "free" in said(capsys, ranker, "--gpus", "1xL4") and "fits" in said(capsys, ranker, "--json")


def test_what_was_said_of_the_weights_is_said_to_the_worker(capsys: Captured) -> None:
    for words, flags in {
        "--dtype float16": "--dtype float16",
        "--quantization fp8": "--quantization fp8_per_tensor",
        "--quantization fp8-block": "--quantization fp8_per_block",
        "--quantization none": "none",
    }.items():
        found = said(capsys, str(QWEN), "--gpus", "L40S", "--tp", "1", *words.split()).splitlines()
        assert found[-1] == f"flags     {flags}"
        assert not found[-2].startswith("note")


def test_weights_that_no_flag_makes_are_named_and_those_that_are_so_already_need_none(
    capsys: Captured, tmp_path: Path
) -> None:
    one = ("--gpus", "L40S", "--tp", "1", "--quantization", "int4")
    found = said(capsys, str(QWEN), *one)
    assert "note      weights in int4 need other files: no flag converts these\nflags     none" in found
    argv = (str(R1), "--gpus", "8xH200", "--tp", "8", "--max-model-len", "4096")
    assert said(capsys, *argv, "--quantization", "fp8-block") == said(capsys, *argv)
    config = json.loads((QWEN / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "new"}}))
    unknown = said(capsys, str(file), *one)
    assert unknown.splitlines()[-1] == "flags     none"
    assert "note" not in unknown


def test_a_folder_or_a_file_or_a_cached_hub_id_is_found(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text((QWEN / "config.json").read_text())
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    texts = {said(capsys, model) for model in ("org/name", str(QWEN), str(QWEN / "config.json"))}
    assert len(texts) == 1


def test_the_exit_code_says_whether_it_fits(capsys: Captured) -> None:
    for words, code in {
        f"{QWEN}": 0,
        f"{QWEN} --gpus 1xH100": 0,
        f"{QWEN} --gpus 1xNEW:12": 1,
        f"{R1} --gpus 8xH100 --tp 8": 1,
        f"{R1} --gpus 8xH100": 1,
    }.items():
        assert main.run(["size", *words.split()]) == code
        assert (": too big by" in capsys.readouterr().out) == (code == 1)


def test_a_worker_spans_as_many_nodes_as_it_must(capsys: Captured) -> None:
    found = said(capsys, str(R1), "--gpus", "16xH200", "--nodes", "4", "--dp", "8", "--ep", "--brief")
    assert found.startswith(
        "layout    data parallel 8, expert parallel = 8 GPUs on 2 nodes; 2 workers like this"
    )
    assert "--data-parallel-size 8 --data-parallel-size-local 4 --enable-expert-parallel" in found


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (str(RECIPES), "has no config.json"),
        (__file__, "is not JSON"),
        (f"{QWEN} --colour", "--colour is not an option of size"),
        (f"{QWEN} --tp 2", "a layout needs GPUs; add --gpus"),
        (f"{QWEN} --gpus 4xH100 --tp 8", "--tp 8 --pp 1 --dp 1 take 8 GPUs; --gpus 4xH100 has 4"),
        (f"{QWEN} --gpus 8xH100 --nodes 3", "8xH100 cannot be divided evenly among --nodes 3"),
        (f"{QWEN} --gpus 8xH100 --nodes 2 --pp 5", "5 GPUs cannot be divided evenly among 2"),
        (f"{QWEN} --gpus H100 --max-model-len 0", "--max-model-len 0 must be 1 or more"),
        (f"{QWEN} --gpu-memory-utilization 92", "92.0 must be above 0 and at most 1"),
        (f"{QWEN} --kv-offload-gb 0", "--kv-offload-gb 0.0 must be above 0"),
        (f"{QWEN} --kv-offload-disk /kv:much", "--kv-offload-disk /kv:much is not a size in GB"),
        (f"{QWEN} --quantization int3", "--quantization='int3' is unknown"),
        (f"{QWEN} --reserve-gib -1", "--reserve-gib -1.0 must be 0 or more"),
    ],
)
def test_bad_settings_are_refused_with_the_fix(words: str, complaint: str, capsys: Captured) -> None:
    assert main.run(["size", *words.split()]) == 2
    assert complaint in capsys.readouterr().err


def test_a_pipeline_of_models_names_its_parts(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    assert main.run(["size", str(tmp_path)]) == 2
    assert "is a pipeline of several models; give one part of it" in capsys.readouterr().err


def test_json_has_the_numbers(capsys: Captured) -> None:
    found = json.loads(said(capsys, str(R1), "--gpus", "16xH200", "--max-model-len", "16384", "--json"))
    assert found["parameters"] == 671_026_419_200
    assert found["cache_bytes_per_token"] == 70_272
    assert found["fits"]
    first = found["layouts"][0]
    assert first["layout"] == {"tp": 1, "pp": 1, "dp": 8, "ep": True, "nodes": 1, "gpus": 8}
    assert first["flags"] == [
        "--data-parallel-size",
        "8",
        "--enable-expert-parallel",
        "--max-model-len",
        "16384",
    ]
    one = json.loads(said(capsys, str(R1), "--gpus", "8xH200", "--dp", "8", "--ep", "--json"))
    assert (
        one["layout"]["room"] == one["layout"]["total"] - one["layout"]["weights"] - one["layout"]["reserve"]
    )


def test_one_request_of_an_average_length_counts_windows_only_where_the_engine_does(
    capsys: Captured,
) -> None:
    argv = [str(RECIPES / "gpt-oss" / "20b"), "--gpus", "H100", "--tp", "1", "--json"]
    hybrid = json.loads(said(capsys, *argv))["layout"]
    whole = json.loads(said(capsys, *argv, "--no-hybrid-cache"))["layout"]
    assert hybrid["requests_of_max_len"] > 1.7 * whole["requests_of_max_len"]
