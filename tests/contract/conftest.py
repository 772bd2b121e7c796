"""Imports vLLM once, and forks a process that keeps it as it is: tests change it in this one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest

from dynamo_vllm import forking
from dynamo_vllm.engine.process import preload

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "GptOssForCausalLM",
)
"""vLLM would start a process to look at a model's class, which imports all of vLLM."""
with warnings.catch_warnings(), pytest.MonkeyPatch.context() as environment:
    warnings.simplefilter("ignore")
    for name, value in preload.ONE_THREAD.items():
        environment.setenv(name, value)
    preload.import_vllm(ARCHITECTURES)
    try:
        FORKED: forking.Zygote | None = forking.make_zygote()
    except forking.CannotFork:  # pytest-xdist has threads
        FORKED = None


@pytest.fixture(scope="session")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forking.Zygote]:
    """Returns what forks processes that have imported vLLM, and none of our patches."""
    if FORKED is not None:
        yield FORKED
        return
    from harness import warm

    with warm.zygote(tmp_path_factory.mktemp("zygote")) as started:
        yield started.inner


def pytest_unconfigure() -> None:
    if FORKED is not None:
        FORKED.close()
