"""Tests that after the warm-up no kind of request builds anything in a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models.vision import make_tiny_vision_model

from cpu.children import Children
from cpu.completions import complete
from cpu.stacks import Start
from dynamo_vllm.roles.trials import SHORT
from harness.warm import WARMED

pytestmark = pytest.mark.more


def first_requests(children: Children, model: Path, adapter: str = "", takes_embeds: bool = False) -> Any:
    """None may import anything: that is a sign of everything that a first request builds."""
    seen = children.ask("warmth:run", str(model), adapter, takes_embeds)
    assert {kind: modules for kind, modules in seen["new"].items() if modules} == {}
    return seen


@pytest.mark.timeout(200)
def test_no_kind_of_request_imports_anything_and_none_was_counted(children: Children, model: Path) -> None:
    seen = first_requests(children, model, takes_embeds=True)
    assert {"embeds", "json", "logprobs"} <= set(seen["new"])
    assert seen["counted"] == {}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_adapter_imports_nothing(children: Children, model: Path, adapters: dict[str, Path]) -> None:
    assert "adapter" in first_requests(children, model, str(adapters["a"]))["new"]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_picture_imports_nothing(children: Children, tmp_path: Path) -> None:
    model = make_tiny_vision_model(tmp_path / "model", "qwen2-vl")
    assert "picture" in first_requests(children, model)["new"]


@pytest.mark.parametrize("flags", [(), ("--use-vllm-tokenizer",)])
def test_nobody_is_told_of_the_warm_up(start: Start, flags: tuple[str, ...]) -> None:
    made = start(*flags, env=WARMED)
    (worker,) = made.workers
    log = worker.log.read_text()
    assert "warmed up with" in log
    assert "warm-up:" not in log, "a kind that failed"
    assert worker.metric("vllm:prompt_tokens_total") < SHORT, "canaries have one token each"
    assert complete(made, "a " * 100, 2).cached == 0
