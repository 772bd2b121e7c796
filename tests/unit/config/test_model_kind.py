"""Tests what a model's folder says it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_vllm.cli.check import facts_of
from dynamo_vllm.config import model_kind
from dynamo_vllm.config.model_kind import GENERATE, POOLING, TRANSCRIPTION, kind_of
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.worker_plan import WorkerPlan, parse


def folder_of(path: Path, *architectures: str) -> str:
    (path / "config.json").write_text(json.dumps({"architectures": architectures}))
    return str(path)


KINDS = {
    GENERATE: "Qwen3ForCausalLM LlavaForConditionalGeneration GPT2LMHeadModel SomethingElse",
    POOLING: "BertModel XLMRobertaForSequenceClassification Qwen3ForSequenceClassification "
    "BertForTokenClassification InternLM2ForRewardModel",
    TRANSCRIPTION: "WhisperForConditionalGeneration",
}


def test_architecture_tells(tmp_path: Path) -> None:
    for kind, architectures in KINDS.items():
        for architecture in architectures.split():
            assert kind_of(folder_of(tmp_path, architecture), {}) == kind, architecture


def test_files_of_sentence_transformers_win_over_the_architecture(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "1_Pooling").mkdir()
    assert kind_of(folder_of(tmp_path, "Qwen3ForCausalLM"), {}) == POOLING


def test_odd_files_mean_generation(tmp_path: Path) -> None:
    for content in ("", "[]", "{}", '{"architectures": "BertModel"}', '{"architectures": [7]}'):
        (tmp_path / "config.json").write_text(content)
        assert kind_of(str(tmp_path), {}) == GENERATE, content
    assert kind_of(str(tmp_path / "nowhere"), {}) == kind_of(None, {}) == GENERATE


def test_flags_of_vllm_win(tmp_path: Path) -> None:
    chat, bert = tmp_path / "chat", tmp_path / "bert"
    for path, name in ((chat, "Qwen3ForCausalLM"), (bert, "BertModel")):
        path.mkdir()
        folder_of(path, name)
    assert kind_of(str(chat), {"runner": "pooling"}) == POOLING
    assert kind_of(str(chat), {"convert": "embed"}) == POOLING
    assert kind_of(str(chat), {"convert": "none"}) == GENERATE
    assert kind_of(str(bert), {"runner": "generate"}) == GENERATE


def test_plan_has_the_role_of_the_model_unless_the_user_named_one(tmp_path: Path) -> None:
    model = folder_of(tmp_path, "BertModel")
    plan = parse(["--model", model], {})
    assert plan.options.role == "pooling"
    assert plan.options.card.router == "least-loaded"
    assert not plan.options.card.publishes_kv_events
    assert facts_of(plan)["kv events"] == "none from a pooling model"
    assert parse(["--model", model, "--disaggregation-mode", "agg"], {}).options.role == "agg"
    assert parse(["--model", "some/hub-model", "--runner", "pooling"], {}).options.role == "pooling"


def test_plan_learns_the_role_of_a_model_that_was_fetched(tmp_path: Path) -> None:
    plan = WorkerPlan.of(WorkerOptions(model="some/hub-model"))
    assert plan.options.role == "agg"
    fetched = plan.with_options(WorkerOptions(model=folder_of(tmp_path, "BertModel")))
    assert fetched.options.role == "pooling"


def test_tokens_of_a_sound(tmp_path: Path) -> None:
    for config, positions in (
        ({"max_source_positions": 500}, 500),
        ({}, 1500),
        ({"max_source_positions": "many"}, 1500),
        ([], 1500),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert model_kind.source_positions(str(tmp_path)) == positions
    assert model_kind.source_positions(str(tmp_path / "none")) == 1500


OVERRIDES = '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}'


def test_overrides_of_the_architecture_win(tmp_path: Path) -> None:
    chat = folder_of(tmp_path, "Qwen3ForCausalLM")
    assert kind_of(chat, {"hf_overrides": OVERRIDES}) == POOLING
    assert kind_of(chat, {"hf_overrides": '{"num_labels": 1}'}) == GENERATE
    assert kind_of(chat, {"hf_overrides": "{"}) == GENERATE


CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "flags", "is_so"),
    [
        ({**CLASSIFIER, "num_labels": 1}, {}, True),
        ({**CLASSIFIER, "id2label": {"0": "x"}}, {}, True),
        ({**CLASSIFIER, "id2label": {"0": "x", "1": "y"}}, {}, False),
        (CLASSIFIER, {}, False),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"hf_overrides": OVERRIDES}, True),
        ({"architectures": ["Qwen3ForCausalLM"], "num_labels": 1}, {"convert": "classify"}, True),
        ({"architectures": ["BertModel"], "num_labels": 1}, {}, False),
    ],
)
def test_classifier_with_one_class_scores_pairs(
    tmp_path: Path, config: dict[str, object], flags: dict[str, object], is_so: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_kind.scores_pairs(str(tmp_path), flags) is is_so
