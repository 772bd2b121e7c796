"""Runs a deterministic engine without a model, for tests and for measuring all parts except the engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.engine.base import (
    AddAdapter,
    Counting,
    EngineOp,
    LoadFigures,
    OnLoad,
    Pause,
    RemoveAdapter,
    Resume,
    Sink,
    Sleep,
    Wake,
)
from dynamo_vllm.engine.fake import parts, pooling
from dynamo_vllm.engine.fake.answers import fetched, logprobs, rank_of, token_at, transfer_params
from dynamo_vllm.engine.fake.spec import facts_of
from dynamo_vllm.errors import AdapterRefused, EngineDead, EngineOverloaded, EngineRequestFailed
from dynamo_vllm.job import Adapter, Job, Output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dynamo_vllm.engine.fake.spec import FakeSpec
    from dynamo_vllm.engine.process.activity import Vitals
    from dynamo_vllm.job import PoolingSpec, SpeechSpec

REPORT_SECONDS = 0.1
"""The time between load figures while jobs run; a real engine reports them after every step."""
_DIES = "the fake engine is set to die"


@dataclass(slots=True)
class Running:
    """Holds the state of one running job."""

    job: Job
    sink: Sink
    done: asyncio.Future[None]
    due: float
    """When its next output is due; infinity for a job that waits or hangs."""
    waits: bool = False
    """For the end of another job."""
    index: int = 0
    made: int = 0
    """The tokens generated for the current choice."""
    rest: Iterator[Output] | None = None
    """What is still to come of a transcript."""


class FakeEngine:
    """Generates tokens that count up from the prompt, with the delays and faults of its spec.

    Like a real engine it works in steps: each step generates the next output of every job that is due.
    """

    def __init__(
        self,
        spec: FakeSpec,
        on_load: OnLoad,
        kv_events: str | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self.facts = facts_of(spec, kv_events)
        self._on_close = on_close
        self.parts = parts.of(spec)
        self.aborted: list[str] = []
        self.running: dict[str, Running] = {}
        self.operations: list[EngineOp] = []
        self.adapters: dict[int, Adapter] = {}
        self._is_stopped = False
        self._on_load = on_load
        self._made = dict.fromkeys(range(spec.ranks), 0)
        self._busy = dict.fromkeys(range(spec.ranks), 0)
        self._waiting = dict.fromkeys(range(spec.ranks), 0)
        self._asked = dict.fromkeys(range(spec.ranks), 0)
        self._found = dict.fromkeys(range(spec.ranks), 0)
        self._report_due = 0.0
        self._dead = False
        self._changed = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._next_step = 0.0
        self.counting = Counting()

    async def stream(self, job: Job, sink: Sink) -> None:
        if job.prompt[0] == self.spec.fail_on_token:
            raise EngineRequestFailed("the fake engine is set to fail on this prompt")
        loop = asyncio.get_running_loop()
        if job.prompt[0] == self.spec.die_on_token:
            self._dead = True
            for run in self.running.values():
                fail(run, EngineDead(_DIES))
            raise EngineDead(_DIES)
        most = self.spec.max_num_queued_reqs
        if most is not None and len(self.running) >= most:
            raise EngineOverloaded(f"the fake engine is set to take {most} jobs")
        run = self.running[job.id] = Running(job, sink, loop.create_future(), self._first_due(job))
        if most is not None and self._seated(rank_of(job)) >= self.spec.max_num_seqs:
            run.waits, run.due = True, math.inf
            self._waiting[rank_of(job)] += 1
        self._asked[rank_of(job)] += len(job.prompt)
        self._found[rank_of(job)] += fetched(job)
        self._report(rank_of(job), 1)
        self._changed.set()
        if self._steps is None or self._steps.done():
            self._steps = loop.create_task(self._work())
        try:
            await run.done
        finally:
            if job.speech is not None:
                job.speech.drop_sound()
            self.running.pop(job.id, None)
            self._leave(run)
            self._report(rank_of(job), -1)

    def _first_due(self, job: Job) -> float:
        hangs = job.prompt[0] == self.spec.stall_on_token or rank_of(job) == self.spec.stall_rank
        now = asyncio.get_running_loop().time()
        return math.inf if hangs else now + self.spec.prefill_ms / 1000

    def _seated(self, rank: int) -> int:
        return self._busy[rank] - self._waiting[rank]

    def _leave(self, run: Running) -> None:
        """Gives the seat of an ended job to the next one that waits."""
        rank = rank_of(run.job)
        if not self._waiting[rank]:
            return
        self._waiting[rank] -= 1
        if not run.waits:
            following = next(
                other for other in self.running.values() if other.waits and rank_of(other.job) == rank
            )
            following.waits, following.due = False, self._first_due(following.job)
            self._changed.set()

    async def _work(self) -> None:
        """Runs steps until there is no job left."""
        now = asyncio.get_running_loop().time
        while self.running:
            await self._until(self._next_due() - now())
            if self._is_stopped:
                continue
            moment = now()
            following = self._after(moment)
            for run in list(self.running.values()):
                if run.due <= moment and not run.done.done():
                    run.due = following
                    self._step(run)
            if moment >= self._report_due:
                self._report_due = moment + REPORT_SECONDS
                for rank in self._busy:
                    self._report(rank, 0)

    def _next_due(self) -> float:
        return math.inf if self._is_stopped else min(run.due for run in self.running.values())

    def _after(self, moment: float) -> float:
        """Returns the time of the next step, which is the same for all jobs."""
        if self._next_step <= moment:
            self._next_step = moment + self.spec.token_ms / 1000
        return self._next_step

    async def _until(self, seconds: float) -> None:
        """Waits until the next step is due, or a job starts or ends."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), None if seconds == math.inf else seconds)

    def _step(self, run: Running) -> None:
        """Generates the next output of one job."""
        job, spec = run.job, self.spec
        if job.pooling is not None:
            self._pool(run, job.pooling)
            return
        if job.speech is not None:
            self._transcribe(run, job.speech)
            return
        whole, end = job.sampling.max_tokens, "length"
        if spec.echo and len(job.prompt) <= whole:
            whole, end = len(job.prompt), "stop"
        count = min(spec.tokens_per_output, whole - run.made)
        ids = [self._token(job, run.made + i) for i in range(count)]
        if not self._count(count, run):
            return
        run.made += count
        if job.media is not None:
            job.media.drop_media()
        finish = end if run.made == whole else None
        is_last = finish is not None and run.index == job.sampling.n - 1
        output = Output(
            ids,
            run.index,
            text="".join(f" {i}" for i in ids) if job.sampling.detokenize else None,
            finish=finish,
            finished=is_last,
            cached_tokens=fetched(job) if finish else None,
            logprobs=logprobs(job, ids),
            transfer=transfer_params(job) if finish else None,
        )
        if finish is not None:
            run.index, run.made = run.index + 1, 0
        send(run, output)

    def _pool(self, run: Running, wanted: PoolingSpec) -> None:
        """Sends all vectors of one job; each prompt counts as a token."""
        if not self._count(len(wanted.prompts), run):
            return
        size = self.spec.dimensions if self.spec.pooling == "embed" else self.spec.labels
        for output in pooling.outputs(wanted, size):
            send(run, output)

    def _transcribe(self, run: Running, wanted: SpeechSpec) -> None:
        """Sends the next piece of a transcript."""
        if run.rest is None:
            from dynamo_vllm.engine.fake import speech  # which imports numpy

            run.rest = speech.outputs(run.job, wanted)
        output = next(run.rest)
        if self._count(max(1, len(output.token_ids)), run):
            send(run, output)

    def _token(self, job: Job, number: int) -> int:
        if self.spec.echo:
            return job.prompt[number % len(job.prompt)]
        return token_at(job, len(job.prompt) + number, self.spec.vocab_size)

    def _count(self, tokens: int, run: Running) -> bool:
        """Counts tokens; returns False if the spec says that the engine now dies or hangs."""
        rank = rank_of(run.job)
        self._made[rank] += tokens
        made = sum(self._made.values())
        if self.spec.die_after is not None and made > self.spec.die_after:
            self._dead = True
        if self._dead:
            fail(run, EngineDead(_DIES))
            return False
        if self.spec.stall_after is not None and made > self.spec.stall_after:
            self._made[rank] -= tokens
            run.due = math.inf
            return False
        return True

    def _report(self, rank: int, change: int) -> None:
        self._busy[rank] += change
        running, waiting = self._seated(rank), self._waiting[rank]
        usage = min(1.0, running / self.spec.max_num_seqs)
        counts = self._made[rank], self._asked[rank], self._found[rank]
        self._on_load(LoadFigures(rank, running, waiting, usage, *counts))

    async def abort(self, job_id: str) -> None:
        self.aborted.append(job_id)
        if run := self.running.get(job_id):
            send(run, Output([], run.index, finish="abort", finished=True, cached_tokens=0))
            self._changed.set()

    async def control(self, op: EngineOp) -> int | None:
        if self._dead:
            raise EngineDead("the fake engine is dead")
        match op:
            case AddAdapter(adapter):
                if adapter.name == self.spec.refuse_adapter:
                    raise AdapterRefused("the fake engine is set to refuse it")
                await asyncio.sleep(self.spec.adapter_ms / 1000)
                self.adapters[adapter.id] = adapter
            case RemoveAdapter(adapter):
                self.adapters.pop(adapter.id, None)
            case Sleep() | Pause():
                self._is_stopped = True
            case Wake() | Resume():
                self._is_stopped = False
        self.operations.append(op)
        self._changed.set()
        return None

    async def check_health(self) -> None:
        if self._dead:
            raise EngineDead("the fake engine is dead")

    def outputs_seen(self) -> Mapping[int, int]:
        return self._made

    async def vitals(self) -> Mapping[int, Vitals]:
        return {}

    def metrics_text(self) -> str:
        return ""

    async def close(self) -> None:
        for job_id in list(self.running):
            await self.abort(job_id)
        self._on_close()


def send(run: Running, output: Output) -> None:
    """Passes an output to the job's sink; if the sink raises, only this job ends."""
    if run.done.done():
        return
    try:
        run.sink(output)
    except Exception as exc:
        fail(run, exc)
    else:
        if output.finished:
            run.done.set_result(None)


def fail(run: Running, exc: Exception) -> None:
    """Ends a job with an exception, unless it has already ended."""
    if not run.done.done():
        run.done.set_exception(exc)
