"""Runs our engine with and without direct egress, in one process forked from the zygote."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.vllm.launch import launch
from dynamo_vllm.job import Job, Output, SamplingSpec
from harness import metrics
from harness.waiting import until
from harness.warm import CACHE_BLOCKS

if TYPE_CHECKING:  # it imports vLLM, which `launch` prepares first
    from dynamo_vllm.engine.vllm.engine import VllmEngine

Found = dict[str, Any]
FLAGS = (
    *("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32", "--block-size", "32"),
    *("--distributed-executor-backend", "uni", "--max-num-seqs", "4"),
    *("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
)


async def run(model: str) -> dict[str, Found]:
    async with launched(model) as engine:
        return {scenario.__name__: await scenario(engine) for scenario in SCENARIOS}


def settings(model: str, *flags: str, **more: Any) -> EngineSettings:
    environment = dict(os.environ)
    return EngineSettings(
        model=model, argv=(*FLAGS, *flags), environment=environment, publishes_kv_events=False, **more
    )


@contextlib.asynccontextmanager
async def launched(model: str, *flags: str, **more: Any) -> AsyncIterator[VllmEngine]:
    engine = await launch(settings(model, *flags, **more), lambda load: None, lambda phase: None)
    try:
        yield engine
    finally:
        await engine.close()


class Interrupted(BaseException):
    """Is raised in place of a signal."""


async def run_interrupted(model: str) -> Found:
    """Interrupts a launch when the engine core runs, and returns what is left."""
    this, counts = psutil.Process(), Found()

    def interrupt(phase: str) -> None:
        if phase == "cache":
            counts["running"] = len(this.children(recursive=True))
            raise Interrupted

    try:
        await launch(settings(model), lambda load: None, interrupt)
    except Interrupted:  # which holds what joins the engine core
        await asyncio.to_thread(until, "the end of its processes", lambda: not this.children(recursive=True))
    return {**counts, "left": len(this.children(recursive=True))}


def job(name: str, prompt: list[int], **sampling: Any) -> Job:
    given = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return Job(name, prompt, SamplingSpec(**given))


async def outputs(engine: VllmEngine, asked: Job) -> list[Found]:
    found: list[Output] = []
    await engine.stream(asked, found.append)
    return [dataclasses.asdict(output) for output in found]


def one_by_one(outputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Splits outputs into one per token, without texts: on a busy machine vLLM returns several at once.

    Cached tokens count in the last one, as in a client's usage.
    """
    found: list[dict[str, Any]] = []
    for output in outputs:
        *early, last = output["token_ids"] or [None]
        plain = {**output, "finish": None, "stop_reason": None, "finished": False}
        found += [{**plain, "token_ids": [token]} for token in early]
        found.append({**output, "token_ids": [last]})
    return [{**output, "text": None, "cached_tokens": None} for output in found[:-1]] + [
        {**found[-1], "text": None}
    ]


def long_way(engine: VllmEngine) -> VllmEngine:
    """Turns direct egress off in the same running engine."""
    return dataclasses.replace(engine, direct=None)


def figures(engine: VllmEngine) -> dict[str, float]:
    """Returns vLLM's counters and the counts of its histograms; times differ from run to run."""
    return {
        metrics.series(sample): sample.value
        for sample in metrics.samples(engine.metrics_text())
        if sample.name.startswith("vllm:") and sample.name.endswith(("_total", "_count"))
    }


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {k: v - before.get(k, 0.0) for k, v in after.items() if v != before.get(k, 0.0)}


CASES: dict[str, Job] = {
    "greedy": job("greedy", list(range(20, 120)), max_tokens=40),
    "one token": job("one", [30], max_tokens=1),
    "sampled": job("sampled", [40, 41, 42], temperature=0.8, seed=7, max_tokens=30),
    "stop token": job("stop", [50, 51], stop_token_ids=list(range(10, 400)), max_tokens=60),
    "min tokens": job("min", [50, 52], stop_token_ids=list(range(10, 900)), min_tokens=9, max_tokens=60),
    "penalties": job("pen", [60, 61], repetition_penalty=1.3, presence_penalty=0.5, max_tokens=30),
    "bias": job("bias", [62, 63], logit_bias={77: 100.0}, max_tokens=5),
    "long prompt": job("long", [10 + i % 800 for i in range(1500)], max_tokens=20),
}


async def both_ways(engine: VllmEngine, cases: Mapping[str, Job]) -> Found:
    """Runs each case with and without direct egress, with a cold and a warm cache."""
    found: Found = {}
    other = long_way(engine)
    for at in ("cold", "warm"):
        for name, asked in cases.items():
            for way, made in (("direct", engine), ("long", other)):
                await engine.llm.reset_prefix_cache()
                if at == "warm":
                    await outputs(other, asked)
                before = figures(made)
                answer = await outputs(made, asked)
                found[f"{name}, {at}, {way}"] = {"outputs": answer, "grown": grown(before, figures(made))}
    return found


async def parity(engine: VllmEngine) -> Found:
    return await both_ways(engine, CASES)


async def crowd(engine: VllmEngine) -> Found:
    """Runs more jobs than fit into a batch, with and without direct egress; each must get its own tokens."""
    other = long_way(engine)
    asked = [job(f"j{i}", [20 + i, 30 + i, 40 + i], max_tokens=5 + i) for i in range(16)]
    alone = [await outputs(other, one) for one in asked]
    made = [engine if i % 2 else other for i in range(16)]
    together = await asyncio.gather(*(outputs(e, one) for e, one in zip(made, asked, strict=True)))
    return {"alone": [_tokens(a) for a in alone], "together": [_tokens(a) for a in together]}


def _tokens(answer: list[Found]) -> list[int]:
    return [token for output in answer for token in output["token_ids"]]


async def _idle(engine: VllmEngine) -> bool:
    """Checks that nothing of a job is left in our engine or in vLLM."""
    assert engine.direct is not None
    processor: Any = engine.llm.output_processor
    return not engine.direct._taps and not processor.request_states and not processor.external_req_ids


async def aborts(engine: VllmEngine) -> Found:
    """Ends a job while it runs, while it is queued, and by cancelling its task."""
    found: Found = {}
    first = asyncio.Event()
    running: list[Output] = []

    def keep(output: Output) -> None:
        running.append(output)
        first.set()

    busy = [
        asyncio.create_task(engine.stream(job(f"b{i}", [20 + i], max_tokens=1500), keep)) for i in range(4)
    ]
    await first.wait()
    queued: list[Output] = []
    waiting = asyncio.create_task(engine.stream(job("q", [90], max_tokens=5), queued.append))
    await asyncio.sleep(0)
    processor: Any = engine.llm.output_processor
    while "q" not in processor.external_req_ids:
        await asyncio.sleep(0)
    await engine.abort("q")
    await waiting
    found["queued"] = [dataclasses.asdict(o) for o in queued]
    await engine.abort("b0")
    await busy[0]
    busy[1].cancel()
    found["cancelled"] = (await asyncio.gather(busy[1], return_exceptions=True))[0].__class__.__name__
    await asyncio.gather(engine.abort("b2"), engine.abort("b3"), engine.abort("unknown"))
    await asyncio.gather(*busy[2:])
    found["finishes"] = sorted(o.finish for o in running if o.finish)
    found["idle"] = await _idle(engine)
    found["after"] = _tokens(await outputs(engine, job("after", [33], max_tokens=4)))
    found["expected"] = _tokens(await outputs(long_way(engine), job("after2", [33], max_tokens=4)))
    return found


class Broken(Exception):
    pass


async def sink_that_raises(engine: VllmEngine) -> Found:
    """Raises at the first, a later and the last output: only this job ends."""
    found: Found = {}
    expected = _tokens(await outputs(long_way(engine), job("n", [33], max_tokens=30)))
    for number, when in (("first", 1), ("middle", 5), ("last", 12)):
        seen: list[Output] = []

        def sink(output: Output, seen: list[Output] = seen, when: int = when) -> None:
            seen.append(output)
            if len(seen) == when:
                raise Broken

        neighbour = asyncio.create_task(outputs(engine, job(f"n{number}", [33], max_tokens=30)))
        raised = ""
        try:
            await engine.stream(job(f"x{number}", [44], max_tokens=12), sink)
        except Broken:
            raised = "Broken"
        found[number] = {
            "raised": raised,
            "outputs": len(seen),
            "neighbour": _tokens(await neighbour) == expected,
            "idle": await _idle(engine),
        }
    return found


async def refusals(engine: VllmEngine) -> Found:
    """What vLLM refuses before it queues a job is refused equally with and without direct egress."""
    cases = {
        "too long": job("r1", [20] * 3000),
        "temperature": job("r2", [20], temperature=-1.0),
        "token": job("r3", [10**6]),
        "rank": dataclasses.replace(job("r4", [20]), data_parallel_rank=5),
    }
    found: Found = {}
    for name, asked in cases.items():
        for way, made in (("direct", engine), ("long", long_way(engine))):
            try:
                await outputs(made, asked)
                found[f"{name}, {way}"] = "accepted"
            except Exception as exc:
                found[f"{name}, {way}"] = f"{type(exc).__name__}: {exc}"
    found["idle"] = await _idle(engine)
    found["after"] = len(await outputs(engine, job("after", [33], max_tokens=4)))
    return found


async def death(engine: VllmEngine) -> Found:
    """Kills the engine's process under running jobs, then sends another job."""
    first = asyncio.Event()
    tasks = [
        asyncio.create_task(engine.stream(job(f"d{i}", [20 + i], max_tokens=1500), lambda _: first.set()))
        for i in range(3)
    ]
    await first.wait()
    manager: Any = engine.llm.engine_core.resources.engine_manager
    for process in manager.processes:
        os.kill(process.pid, signal.SIGKILL)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    again = await asyncio.gather(engine.stream(job("late", [9]), lambda _: None), return_exceptions=True)
    return {"ended": [type(e).__name__ for e in ended], "again": type(again[0]).__name__}


SCENARIOS: tuple[Callable[[VllmEngine], Awaitable[Found]], ...]
SCENARIOS = (parity, crowd, aborts, sink_that_raises, refusals, death)
