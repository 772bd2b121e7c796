"""The fake engine's seats and its bounded queue, as those of vLLM."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_vllm.engine.base import LoadFigures
from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.errors import EngineOverloaded
from dynamo_vllm.job import Job, Output, SamplingSpec
from harness.fakes import outputs

SPEC = FakeSpec(max_num_seqs=1, max_num_queued_reqs=2, stall_on_token=99)


class Crowd:
    """An engine with one seat and one place to wait, and those who ask it."""

    def __init__(self) -> None:
        self.loads: list[LoadFigures] = []
        self.engine = FakeEngine(SPEC, self.loads.append)

    async def ask(self, name: str, token: int = 20) -> list[Output]:
        return await outputs(self.engine, Job(name, [token], SamplingSpec(max_tokens=2)))

    @property
    def load(self) -> tuple[int, int]:
        return self.loads[-1].running, self.loads[-1].waiting


async def start(crowd: Crowd, name: str, token: int = 20) -> asyncio.Task[list[Output]]:
    task = asyncio.create_task(crowd.ask(name, token))
    while name not in crowd.engine.running:
        await asyncio.sleep(0)
    return task


async def test_job_waits_for_a_seat_and_a_third_is_refused() -> None:
    crowd = Crowd()
    seated, waiting = await start(crowd, "seated", 99), await start(crowd, "waiting")
    assert crowd.load == (1, 1)
    with pytest.raises(EngineOverloaded):
        await crowd.ask("third")
    assert crowd.load == (1, 1)
    assert not waiting.done()
    await crowd.engine.abort("seated")
    assert [output.finish for output in await waiting] == [None, "length"]
    assert (await seated)[-1].finish == "abort"
    assert crowd.load == (0, 0)


async def test_job_that_leaves_the_queue_takes_no_seat() -> None:
    crowd = Crowd()
    seated, waiting = await start(crowd, "seated", 99), await start(crowd, "waiting")
    await crowd.engine.abort("waiting")
    assert (await waiting)[-1].finish == "abort"
    assert crowd.load == (1, 0)
    waiting = await start(crowd, "another")
    assert crowd.load == (1, 1)
    await crowd.engine.abort("seated")
    assert len(await waiting) == 2 and (await seated)[-1].finish == "abort"
