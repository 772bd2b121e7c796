"""Tests requests that would crash vLLM's engine or corrupt later answers, each over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.stack import Stack, stack
from harness.warm import Zygote


@pytest.fixture(scope="module")
def stepwise(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Prefills 32 tokens per step, so that a prompt takes several steps."""
    with stack(tmp_path_factory.mktemp("stepwise")) as made:
        made.start_frontend()
        warm.start_worker(made, model, "--max-num-batched-tokens", "32", "--max-num-seqs", "8")
        yield made.wait_ready(120)


def seeded(made: Stack, length: int) -> str:
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": [10 + i % 700 for i in range(length)],
        "seed": 5,
        "temperature": 0.9,
        "max_tokens": 12,
    }
    return str(made.openai.completions.create(**ask).choices[0].text)


@pytest.mark.parametrize("length", [20, 100, 400])
def test_seeded_prompt_in_several_prefill_steps(stepwise: Stack, one_worker: Stack, length: int) -> None:
    """vLLM 0.30 on CPU crashed; the answer must not depend on the number of steps either."""
    assert seeded(stepwise, length) == seeded(one_worker, length)
    assert stepwise.workers[0].process.poll() is None
