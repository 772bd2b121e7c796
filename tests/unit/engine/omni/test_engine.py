"""Tests the vLLM-Omni engine without vLLM-Omni: what it counts while stages give no output."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_vllm.engine.base import EngineParts
from dynamo_vllm.engine.omni import engine as omni_engine
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import Job, Output, PipelineSpec, SamplingSpec


class Silent(omni_engine.OmniEngine):
    """Has a diffusion stage that never gives output."""

    def __init__(self, pipeline: Any = None) -> None:
        facts: Any = None
        super().__init__(pipeline, facts, EngineParts(), lambda figures: None)

    async def _media(self, job: Job) -> AsyncGenerator[Output, None]:
        await asyncio.Event().wait()
        yield Output([])


def drawing(name: str) -> Job:
    return Job(name, [], SamplingSpec(max_tokens=1), pipeline=PipelineSpec(prompt="x", seed=1))


async def test_a_hanging_stage_is_detected_while_new_clients_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(omni_engine, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    engine, tasks, seen = Silent(), [], []
    for minute in range(14):
        clock[0] = 60.0 * minute
        tasks.append(asyncio.create_task(engine.stream(drawing(f"j{minute}"), lambda output: None)))
        await asyncio.sleep(0)
        seen.append(engine.outputs_seen()[0])
    patient = int(omni_engine.MAX_GENERATION_SECONDS // 60)
    assert seen[:patient] == list(range(1, patient + 1)), "a long drawing is no hang"
    assert len(set(seen[patient:])) == 1, "nothing came for too long"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Slow:
    """Is a pipeline whose stages end slowly."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.ended = threading.Event()

    def shutdown(self) -> None:
        self.may_end.wait(30)
        self.ended.set()


@pytest.mark.parametrize("is_dead", [True, False])
async def test_a_dead_pipeline_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, is_dead: bool) -> None:
    monkeypatch.setattr(omni_engine, "DEAD_SECONDS", 0.01)
    pipeline = Slow()
    engine = Silent(pipeline)
    engine._is_dead = is_dead
    closing = asyncio.create_task(engine.close())
    if not is_dead:
        await asyncio.sleep(0.05)
        assert not closing.done()
        pipeline.may_end.set()
    await closing
    assert pipeline.ended.is_set() is not is_dead
    pipeline.may_end.set()


async def test_several_choices_of_a_text_stage_are_refused() -> None:
    job = Job("j", [1], SamplingSpec(max_tokens=1, n=2))
    with pytest.raises(InvalidRequest, match="one choice"):
        await Silent().stream(job, lambda output: None)
