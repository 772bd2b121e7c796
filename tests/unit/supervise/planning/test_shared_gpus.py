"""Small models beside others where there are fewer GPUs than workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing.gpus import GIB
from dynamo_vllm.supervise.planning import plan, shared_gpus

GPU = 80 * GIB
DISCOVERY = Path("/run/x/discovery")
SHARE = "--gpu-memory-utilization"


def model(folder: Path, architecture: str, gib: float = 1.0) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(int(gib * GIB))
    return str(folder)


@pytest.fixture
def chat(tmp_path: Path) -> WorkerGroup:
    return WorkerGroup(options={"model": model(tmp_path / "chat", "Qwen3ForCausalLM", 16)})


@pytest.fixture
def embed(tmp_path: Path) -> WorkerGroup:
    return WorkerGroup(options={"model": model(tmp_path / "embed", "BertModel")})


@pytest.fixture
def rerank(tmp_path: Path) -> WorkerGroup:
    return WorkerGroup(
        options={"model": model(tmp_path / "rerank", "XLMRobertaForSequenceClassification", 2)}
    )


def assigned(
    *groups: WorkerGroup, gpus: list[str], memory: int | None = GPU
) -> list[tuple[str | None, str | None]]:
    """The GPUs of each worker in the plan, and its share of their memory."""
    wanted, _ = shared_gpus.put_in(Topology(workers=groups), {}, gpus, memory)
    made = plan.make(wanted, {}, DISCOVERY, gpus)
    shares = [w.argv[w.argv.index(SHARE) + 1] if SHARE in w.argv else None for w in made.workers]
    return [
        (worker.env.get("CUDA_VISIBLE_DEVICES"), share)
        for worker, share in zip(made.workers, shares, strict=True)
    ]


def test_small_models_share_a_gpu_where_there_are_too_few(
    chat: WorkerGroup, embed: WorkerGroup, rerank: WorkerGroup
) -> None:
    assert assigned(chat, embed, rerank, gpus=["0"]) == [("0", "0.8"), ("0", "0.05"), ("0", "0.07")]
    assert assigned(embed, chat, gpus=["0"]) == [("0", "0.05"), ("0", "0.87")]
    assert assigned(chat, embed, gpus=["0", "1"]) == [("0", None), ("1", None)], "there are enough"
    assert assigned(chat, embed, rerank, gpus=["4", "5"]) == [("4", None), ("5", "0.05"), ("5", "0.07")]
    wide = WorkerGroup(count=2, options=chat.options, args=("-tp", "2"))
    found = assigned(wide, embed, gpus=["0", "1", "2", "3"])
    assert found == [("0,1", None), ("2,3", "0.87"), ("3", "0.05")], "on its last GPUs"
    named = WorkerGroup(options=chat.options, env={"CUDA_VISIBLE_DEVICES": "0"})
    other = WorkerGroup(options={"model": "org/other"})
    assert assigned(named, other, embed, gpus=["0", "1"]) == [("0", None), ("1", "0.87"), ("1", "0.05")]


def test_what_the_user_says_stands(chat: WorkerGroup, embed: WorkerGroup) -> None:
    mine = WorkerGroup(options=embed.options, args=(SHARE, "0.3"))
    assert assigned(chat, mine, gpus=["0"]) == [("0", "0.62"), ("0", "0.3")]
    chosen = WorkerGroup(options=chat.options, args=(SHARE, "0.5"))
    assert assigned(chosen, embed, gpus=["0"]) == [("0", "0.5"), ("0", "0.05")]
    with pytest.raises(ConfigError, match="would take 102 % of the memory of GPU 0"):
        assigned(WorkerGroup(options=chat.options, args=(SHARE, "0.97")), embed, gpus=["0"])


def test_what_cannot_share_a_gpu_is_refused(chat: WorkerGroup, embed: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not enough GPUs"):
        assigned(chat, WorkerGroup(options={"model": "org/other"}), embed, gpus=["0"])
    large = WorkerGroup(options={"model": model(tmp_path / "large", "BertModel", 10)})
    with pytest.raises(ConfigError, match="small models would leave 37% of GPU 0 for .*chat; start fewer"):
        assigned(chat, large, gpus=["0"], memory=24 * GIB)
    unknown = WorkerGroup(options={"model": "org/embed", "disaggregation_mode": "pooling"})
    for memory in (None, GPU):
        with pytest.raises(ConfigError, match="not enough GPUs: worker-2 needs 1"):
            assigned(chat, unknown, gpus=["0"], memory=memory)


def test_what_is_shared_is_said(chat: WorkerGroup, embed: WorkerGroup) -> None:
    named = WorkerGroup(options={**embed.options, "served_model_name": ("vectors",)})
    _, said = shared_gpus.put_in(Topology(workers=(chat, named)), {}, ["0"], GPU)
    assert said is not None and "vectors 5% of GPU 0" in said
