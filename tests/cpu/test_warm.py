"""Tests that after the warm-up no kind of request builds anything in a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models.vision import make_tiny_vision_model

from dynamo_vllm.roles.trials import SHORT
from harness.stack import environment, stack
from harness.warm import FORKED, WARMED, Zygote

pytestmark = pytest.mark.more


def found(
    warm: Zygote, folder: Path, model: Path, adapter: str = "", takes_embeds: bool = False
) -> dict[str, Any]:
    args = [str(model), adapter, takes_embeds, str(folder / "out.json")]
    child = warm.fork("cpu.warmth:run", args, environment(folder, **FORKED), folder / "log")
    assert child.wait(150) == 0, (folder / "log").read_text()[-3000:]
    made: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return made


def imported(seen: dict[str, Any]) -> dict[str, list[str]]:
    """Returns what requests of each kind imported: a sign of everything that a first request builds."""
    return {kind: names for kind, names in seen["new"].items() if names}


@pytest.mark.timeout(200)
def test_no_kind_of_request_imports_anything_and_none_was_counted(
    warm: Zygote, model: Path, tmp_path: Path
) -> None:
    seen = found(warm, tmp_path, model, takes_embeds=True)
    assert imported(seen) == {}
    assert {"embeds", "json", "logprobs"} <= set(seen["new"])
    assert seen["counted"] == {}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_adapter_imports_nothing(
    warm: Zygote, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    seen = found(warm, tmp_path, model, str(adapters["a"]))
    assert imported(seen) == {} and "adapter" in seen["new"]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_picture_imports_nothing(warm: Zygote, tmp_path: Path) -> None:
    seen = found(warm, tmp_path, make_tiny_vision_model(tmp_path / "model", "qwen2-vl"))
    assert imported(seen) == {} and "picture" in seen["new"]


@pytest.mark.parametrize("flags", [(), ("--use-vllm-tokenizer",)])
def test_nobody_is_told_of_the_warm_up(
    warm: Zygote, model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, *flags, env=WARMED)
        made.wait_ready(90)
        log = worker.log.read_text()
        assert "warmed up with" in log
        assert "warm-up:" not in log, "a kind that failed"
        assert worker.metric("vllm:prompt_tokens_total") < SHORT, "canaries have one token each"
        body = {"model": "tiny", "prompt": "a " * 100, "max_tokens": 2, "temperature": 0}
        usage = made.post("/v1/completions", body).json()["usage"]
        assert (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) == 0
