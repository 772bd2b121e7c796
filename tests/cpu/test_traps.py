"""Tests requests that would crash vLLM's engine or corrupt later answers, each over HTTP."""

from __future__ import annotations

import pytest

from cpu.completions import complete
from harness.stack import Stack


@pytest.mark.parametrize("length", [20, 100, 400])
def test_seeded_prompt_in_several_prefill_steps(narrow: Stack, one_worker: Stack, length: int) -> None:
    """vLLM 0.30 on CPU crashed; the answer must not depend on the number of steps either."""
    prompt = [10 + i % 700 for i in range(length)]
    texts = [complete(made, prompt, 12, seed=5, temperature=0.9).text for made in (narrow, one_worker)]
    assert texts[0] == texts[1]
    assert narrow.workers[0].process.poll() is None
