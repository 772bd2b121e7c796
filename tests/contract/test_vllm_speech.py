"""Runs of windows in vLLM: order, how many at once, aborts, failures; the engine core is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from dynamo_vllm.engine.vllm.runs.speech import AT_ONCE, SpeechRuns
from dynamo_vllm.errors import EngineDead, EngineRequestFailed
from dynamo_vllm.job import Job, Output, SamplingSpec, SpeechSpec

RATE = 10
WINDOWS = 20


class Speech:
    """The number of a window is the first of its samples."""

    first_timestamp = 1000
    start = (1,)
    language_ids = (5, 6)

    def prompt(self, task: str, language: str, hint: object, *, timestamps: bool) -> list[int]:
        return [1, 2]

    def language(self, token: int) -> str:
        return {5: "en", 6: "ja"}[token]

    async def rendered(self, samples: Any, rate: int, prompt: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"window": int(samples[0]), "prompt": list(prompt)}


class Llm:
    """Answers with the number of each window, in a time that the test chooses."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.begun: list[int] = []
        self.held = asyncio.Event()
        self.held.set()
        self.fails: dict[int, Exception] = {}
        self.aborting: set[str] = set()

    @property
    def vllm_config(self) -> Any:
        return type("", (), {"scheduler_config": type("", (), {"max_num_seqs": 64})})

    async def generate(self, made: Any, params: Any, job_id: str, **_: Any) -> AsyncGenerator[Any, None]:
        number = made["window"]
        self.begun.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if params.max_tokens == 1:
                yield result([params.allowed_token_ids[-1]], "", "length")
                return
            for _turn in range((7 * number) % 5):  # later windows may end before earlier ones
                await asyncio.sleep(0)
            await self.held.wait()
            if exc := self.fails.get(number):
                raise exc
            if job_id in self.aborting:
                yield result([], "", "abort")
                return
            yield result([10 + number], f" {number}", None)
            yield result([9], ".", "stop")
        finally:
            self.running -= 1


def result(ids: list[int], text: str, finish: str | None) -> RequestOutput:
    choice = CompletionOutput(0, text, ids, None, None, finish_reason=finish)
    return RequestOutput("r", None, [1], None, [choice], finished=finish is not None)


def job(language: str | None = "en") -> Job:
    samples = np.repeat(np.arange(WINDOWS, dtype=np.float32), RATE)
    windows = [(n * RATE, (n + 1) * RATE) for n in range(WINDOWS)]
    spec = SpeechSpec(samples=samples, rate=RATE, windows=windows, sound_tokens=1, language=language)
    return Job("job", [1, 2], SamplingSpec(max_tokens=8, temperature=0.0, detokenize=True), speech=spec)


def runs(llm: Llm) -> SpeechRuns:
    told: Any = llm
    speech: Any = Speech()
    return SpeechRuns(told, speech)


async def streamed(made: SpeechRuns, wanted: Job) -> list[Output]:
    found: list[Output] = []
    assert wanted.speech is not None
    await made.stream(wanted, wanted.speech, None, found.append)
    return found


def text(found: list[Output]) -> str:
    return "".join(output.speech.text for output in found if output.speech is not None)


async def test_texts_come_in_order_and_few_windows_run_at_once() -> None:
    llm = Llm()
    wanted = job()
    found = await streamed(runs(llm), wanted)
    assert wanted.speech is not None and wanted.speech.samples is None, "its memory is free"
    assert text(found) == " ".join(f"{n}." for n in range(WINDOWS))
    assert [output.finished for output in found].count(True) == 1 and found[-1].finished
    assert sum(len(output.token_ids) for output in found) == 2 * WINDOWS
    assert 1 < llm.most <= AT_ONCE
    assert llm.running == 0


async def test_language_is_found_once_in_the_first_window_with_sound() -> None:
    llm = Llm()
    found = await streamed(runs(llm), job(None))
    assert llm.begun[0] == 1, "the first window is silent"
    assert len(llm.begun) == WINDOWS + 1
    assert text(found) == "".join(f"{n}." for n in range(WINDOWS)), "Japanese has no blanks"


async def test_first_text_does_not_wait_for_later_windows() -> None:
    llm, made = Llm(), None
    found: list[Output] = []
    seen = asyncio.Event()

    def sink(output: Output) -> None:
        found.append(output)
        if len(found) == 1:
            llm.held.clear()
            seen.set()

    made, wanted = runs(llm), job()
    assert wanted.speech is not None
    task = asyncio.create_task(made.stream(wanted, wanted.speech, None, sink))
    await seen.wait()
    assert not task.done()
    llm.held.set()
    await task
    assert found[-1].finished


async def test_abort_ends_the_job_and_no_further_window_begins() -> None:
    llm = Llm()
    llm.held.clear()
    made = runs(llm)
    task = asyncio.create_task(streamed(made, job()))
    while llm.running < AT_ONCE:
        await asyncio.sleep(0)
    made.abort("job")
    found = await task
    assert [output.finish for output in found] == ["abort"]
    assert len(llm.begun) == AT_ONCE and llm.running == 0


async def test_abort_by_the_engine_and_a_sink_that_raises_end_the_job() -> None:
    llm = Llm()
    llm.aborting.add("job")
    assert (await streamed(runs(llm), job()))[-1].finish == "abort"
    assert llm.running == 0
    llm, wanted = Llm(), job()
    assert wanted.speech is not None

    def sink(_: Output) -> None:
        raise KeyError("left")

    with pytest.raises(KeyError):
        await runs(llm).stream(wanted, wanted.speech, None, sink)
    assert llm.running == 0
    assert len(llm.begun) <= AT_ONCE + 1


@pytest.mark.parametrize(
    ("raised", "ours"), [(EngineDeadError(), EngineDead), (RuntimeError("x"), EngineRequestFailed)]
)
async def test_failing_window_fails_the_job(raised: Exception, ours: type[Exception]) -> None:
    llm = Llm()
    llm.fails[3] = raised
    with pytest.raises(ours):
        await streamed(runs(llm), job())
    assert llm.running == 0
