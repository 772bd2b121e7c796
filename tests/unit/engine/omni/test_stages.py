"""Tests stage files: those of vLLM-Omni 0.30 are read, older ones translated, others refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import yaml

from dynamo_vllm.engine.omni import arguments as omni_arguments
from dynamo_vllm.engine.omni import pipelines as omni_pipelines
from dynamo_vllm.engine.omni import stages as omni_stages
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.job import PipelineLimits

OLDER = """\
stage_args:
  - stage_id: 0
    stage_type: llm
    runtime: {process: true, devices: 0, max_batch_size: 4, requires_multimodal_data: true}
    engine_args:
      model_stage: thinker
      model_arch: Qwen3ForCausalLM
      worker_type: ar
      scheduler_cls: some.Scheduler
      gpu_memory_utilization: 0.8
      enforce_eager: true
    final_output: true
    final_output_type: text
    default_sampling_params: {temperature: 0.0, max_tokens: 16}
  - stage_id: 1
    stage_type: diffusion
    runtime: {devices: "1"}
    engine_args: {dtype: bfloat16}
    engine_input_source: [0]
    final_output: true
    final_output_type: image
runtime: {enabled: true, edges: [{from: 0, to: 1}]}
"""
TODAY = """\
pipeline: dynamo_text
stages:
  - {stage_id: 0, max_num_seqs: 8, devices: "0"}
"""


MINE = TODAY.replace("dynamo_text", "mine")


def written(folder: Path, text: str) -> str:
    file = folder / "stages.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_of_0_30_is_used_unchanged_and_an_older_one_translated(tmp_path: Path) -> None:
    today = omni_stages.read(written(tmp_path, TODAY))
    assert not today.is_translated and today.deploy == yaml.safe_load(TODAY)
    found = omni_stages.read(written(tmp_path, OLDER))
    assert found.kinds == ("llm", "diffusion")
    assert found.deploy == {
        "async_chunk": False,
        "stages": [
            {
                "stage_id": 0,
                "devices": "0",
                "max_num_seqs": 4,
                "gpu_memory_utilization": 0.8,
                "enforce_eager": True,
                "default_sampling_params": {"temperature": 0.0, "max_tokens": 16},
            },
            {"stage_id": 1, "devices": "1", "dtype": "bfloat16"},
        ],
    }
    assert found.dropped == ("runtime", "stage 0: runtime.requires_multimodal_data")


def test_the_message_about_a_translation_can_be_pasted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, OLDER)
    found = omni_stages.read(path)
    with caplog.at_level(logging.WARNING):
        omni_arguments.log_translation(found, path)
    head, _, shown = caplog.messages[0].partition("\n")
    assert path in head
    assert "without runtime" in head
    assert omni_stages.read(written(tmp_path, shown)).deploy == found.deploy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("other: 1", "neither 'stages'"),
        ("stages: [{max_num_seqs: 1}]", "stages[0] has no stage_id"),
        *((f"stage_args: {value}", "'stage_args' must be a list") for value in ("3", "[]", "[3]")),
        ("stage_args: [{runtime: 3}]", "runtime of stage_args[0] must be a mapping, not 3"),
        ("stage_args: [{engine_args: [a]}]", "engine_args of stage_args[0] must be a mapping"),
        ("stage_args: [{default_sampling_params: x}]", "default_sampling_params of stage_args[0] must be"),
        ("stage_args: [{stage_id: one}]", "stage_args[0] has stage_id 'one'; number them from 0"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused_with_their_name(tmp_path: Path, text: str | None, said: str) -> None:
    path = str(tmp_path / "no.yaml") if text is None else written(tmp_path, text)
    with pytest.raises(ConfigError, match="--stage-configs-path") as refused:
        omni_stages.read(path)
    assert path in str(refused.value)
    assert said in str(refused.value)


# --- which pipeline a folder asks for -------------------------------------------------------------------


def put(folder: Path, name: str, content: object) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


LANGUAGE_MODEL = {"architectures": ["Qwen3ForCausalLM"]}
DIFFUSERS = {"_class_name": "StableDiffusionPipeline"}


@pytest.mark.parametrize(
    ("files", "pipeline"),
    [
        ({"config.json": LANGUAGE_MODEL}, ("dynamo_text", "Qwen3ForCausalLM", None)),
        ({"model_index.json": DIFFUSERS}, (None, None, "StableDiffusionPipeline")),
        (
            {"model_index.json": DIFFUSERS, "rewriter/config.json": LANGUAGE_MODEL},
            ("dynamo_rewrite", "Qwen3ForCausalLM", "StableDiffusionPipeline"),
        ),
    ],
    ids=["language model", "diffusers", "diffusers with a rewriter"],
)
def test_pipeline_of_a_folder(
    tmp_path: Path, files: dict[str, object], pipeline: tuple[str | None, ...]
) -> None:
    for name, content in files.items():
        put(tmp_path, name, content)
    chosen = omni_pipelines.choose(str(tmp_path))
    assert (chosen.name, chosen.architecture, chosen.diffusion_class) == pipeline
    if chosen.name == "dynamo_rewrite":
        deploy = omni_arguments.deploy_config(None, chosen)
        assert deploy is not None
        assert [stage["stage_id"] for stage in deploy["stages"]] == [0, 1]


@pytest.mark.parametrize("known", [True, False])
def test_a_model_without_architecture_is_served_where_vllm_omni_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(omni_pipelines, "known_to_omni", lambda config: known)
    put(tmp_path, "config.json", {"model_type": "some_omni"})
    assert omni_pipelines.choose(str(tmp_path)).architecture is None
    if known:
        assert omni_pipelines.resolve(str(tmp_path)) == omni_pipelines.Pipeline(None)
        return
    with pytest.raises(ConfigError, match="names no architecture"):
        omni_pipelines.resolve(str(tmp_path))


def test_a_rewriter_without_architecture_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "model_index.json", DIFFUSERS)
    put(tmp_path, "rewriter/config.json", {})
    with pytest.raises(ConfigError, match="rewriter: its config.json names no architecture"):
        omni_pipelines.choose(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "name", "passes_chunks"),
    [(OLDER, "dynamo_text", False), (TODAY, "dynamo_text", False), (MINE, "mine", None)],
    ids=["older", "today", "mine"],
)
def test_our_pipeline_is_named_and_passes_whole_outputs_unless_the_file_says_otherwise(
    tmp_path: Path, text: str, name: str, passes_chunks: bool | None
) -> None:
    put(tmp_path, "config.json", LANGUAGE_MODEL)
    stages = omni_stages.read(written(tmp_path, text))
    deploy = omni_arguments.deploy_config(stages, omni_pipelines.choose(str(tmp_path)))
    assert deploy is not None
    assert (deploy["pipeline"], deploy.get("async_chunk")) == (name, passes_chunks)


def test_limits_of_images_are_read_from_the_folder(tmp_path: Path) -> None:
    assert omni_arguments.media_limits(str(tmp_path), ["text"], {}) is None
    assert omni_arguments.media_limits(str(tmp_path), ["text", "image"], {}) == PipelineLimits(step=16)
    put(tmp_path, "model_index.json", {"_class_name": "X", "unet": ["diffusers", "UNet2DConditionModel"]})
    put(tmp_path, "vae/config.json", {"block_out_channels": [8, 16, 16, 16]})
    put(tmp_path, "tokenizer/tokenizer_config.json", {"model_max_length": 77})
    put(tmp_path, "scheduler/scheduler_config.json", {"num_train_timesteps": 1000})
    limits = omni_arguments.media_limits(str(tmp_path), ["image"], {})
    assert limits is not None
    assert (limits.step, limits.max_prompt_tokens, limits.max_steps) == (8, 77, 999)
    put(tmp_path, "model_index.json", {"_class_name": "X", "transformer": ["diffusers", "T"]})
    put(tmp_path, "tokenizer/tokenizer_config.json", {"model_max_length": 10**30})
    limits = omni_arguments.media_limits(str(tmp_path), ["text", "image"], {})
    assert limits is not None
    assert (limits.step, limits.max_prompt_tokens) == (16, None)


@pytest.mark.parametrize(
    ("makes", "call", "kind", "frames"),
    [
        (["image"], {"prompt": None}, "image", 81),
        (["image"], {"num_frames": 16}, "video", 16),
        (["image"], {"frames": None}, "video", 81),
        (["video"], {}, "video", 81),
        (["image"], {"audio_length_in_s": None}, "audio", 81),
        (["audio"], {}, "audio", 81),
    ],
)
def test_kind_of_media_follows_from_the_arguments_of_the_pipeline(
    tmp_path: Path, makes: list[str | None], call: dict[str, object], kind: str, frames: int
) -> None:
    put(tmp_path, "model_index.json", {"_class_name": "X"})
    put(tmp_path, "vocoder/config.json", {"sampling_rate": 16000})
    limits = omni_arguments.media_limits(str(tmp_path), makes, call)
    assert limits is not None
    assert (limits.kind, limits.frames, limits.sample_rate) == (kind, frames, 16000)


class Said:
    """Is an output of a text stage, as vLLM-Omni passes it to the next stage."""

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def outputs(self) -> list[Said]:
        return [self]


@pytest.mark.parametrize(
    ("written_text", "prompt", "drawn"),
    [
        ("a cat in the sun", {"prompt": "cat"}, {"prompt": "a cat in the sun"}),
        ("  ", {"prompt": "cat"}, {"prompt": "cat"}),
        ("", "cat", {"prompt": "cat"}),
        ("x", [{"prompt": "cat", "negative_prompt": "dog"}], {"prompt": "x", "negative_prompt": "dog"}),
    ],
)
def test_the_second_stage_gets_the_text_of_the_first(
    written_text: str, prompt: object, drawn: dict[str, str]
) -> None:
    assert omni_pipelines.prompt_of([Said(written_text)], prompt) == drawn
    assert omni_pipelines.prompt_of([]) is None, "without output of the first there is none"
