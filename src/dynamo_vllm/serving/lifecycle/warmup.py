"""Sends an engine one small request of each kind before it serves, so that no client waits for first use.

vLLM builds much with the first request that needs it: imports, grammar tables of the vocabulary, kernels. A
kind that fails is a line in the log; only a dead engine ends the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.base import AddAdapter, RemoveAdapter, ResetCache
from dynamo_vllm.errors import AdminError, DynamoVllmError, EngineDead, EngineError, RequestError
from dynamo_vllm.job import Adapter
from dynamo_vllm.lora import sample
from dynamo_vllm.media import samples
from dynamo_vllm.media.base import KINDS
from dynamo_vllm.media.held_bytes import held_by_request
from dynamo_vllm.roles import trials

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable

    from dynamo_vllm.engine.base import Engine, OnPhase
    from dynamo_vllm.job import Output
    from dynamo_vllm.roles.base import Role
    from dynamo_vllm.roles.trials import Trial
    from dynamo_vllm.serving.lifecycle.operations import Controlled

logger = logging.getLogger(__name__)
ALL_SECONDS = 300.0
"""Limit for everything but the first request, which is required."""
ALONE_SECONDS = 10.0
"""Expected limit for all kinds one by one; a slower engine, and one that compiles no kernels for each of
them, gets them only together."""
LONGER_SECONDS = 0.5
"""Expected limit for a longer prompt."""
REPORT_SECONDS = 2.0
"""A kind that takes longer is logged while it runs."""
_ADAPTER_ID = 1 << 30
"""Far from the ids of the registry."""


@dataclass(frozen=True, slots=True)
class Warming:
    """The parts that a warm-up needs."""

    engine: Engine
    operations: Controlled
    role: Role[Any]
    on_phase: OnPhase
    takes_media: bool = False
    adapter_base: Path | None = None
    """The base model, for an adapter that is generated here."""
    scratch: Path = Path()


async def warm_up(warming: Warming) -> float | None:
    """Run every kind on every rank, with a time limit; raises EngineDead and what a plain request raises.

    Return how many prompt tokens a rank computes in a second; None if the time was up before.
    """
    run = _Run(warming)
    began = time.monotonic()
    try:
        async with asyncio.timeout(ALL_SECONDS) as limit:
            await run.all()
    except TimeoutError:
        if not limit.expired():
            raise
        logger.warning("warm-up: stopped after %.0f s, at %s", ALL_SECONDS, run.current)
    except EngineDead as exc:
        raise EngineDead(f"{exc} (in the warm-up, at {run.current}; --no-warm-up starts without)") from exc
    finally:
        run.cancel_report()
    speed = min(run.speeds, default=None)
    told = "" if speed is None else f"; the engine computes {speed:,.0f} prompt tokens a second"
    logger.info("warmed up with %d requests in %.1f s%s", run.tried, time.monotonic() - began, told)
    await _forget(warming)
    return speed


async def _forget(warming: Warming) -> None:
    """Clear the prefix cache: no client could hit these prompts, but they take room and reach routers.

    Its tiers stay: on disk they hold what an earlier run computed.
    """
    kinds = {"prefix", "multimodal", "encoder"} if warming.takes_media else {"prefix"}
    try:
        await warming.operations.control(ResetCache(frozenset(kinds), with_tiers=False))
    except EngineDead:
        raise
    except (EngineError, AdminError) as exc:
        logger.info("the cache could not be cleared after the warm-up: %s", exc)


async def _together(steps: Iterable[Coroutine[object, object, None]]) -> None:
    """Run all at once; the first exception ends the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for step in steps:
                tasks.create_task(step)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


class _Run:
    """One running warm-up."""

    def __init__(self, warming: Warming) -> None:
        self._warming = warming
        self._numbers = itertools.count(1)
        self._refused: set[str] = set()
        self._report_timer: asyncio.TimerHandle | None = None
        self.tried = 0
        self._is_together = False
        self.current = "greedy"
        self.speeds: list[float] = []
        """Prompt tokens a second, one for each rank."""

    async def all(self) -> None:
        role, facts = self._warming.role, self._warming.engine.facts
        made = role.trials(self._given())
        first = facts.data_parallel_start_rank
        ranks = range(first, first + facts.data_parallel_size)
        async with self._adapter() as adapter:
            await _together(self._rank(rank, made, adapter) for rank in ranks)

    def _given(self) -> trials.TrialInputs:
        salt = f"warm-up {uuid.uuid4().hex}"
        engine = self._warming.engine
        media, embeds = engine.parts.media, engine.parts.embeds
        marks = media.placeholders() if media is not None and self._warming.takes_media else {}
        seen = [
            trials.Medium(kind, url, tuple(marks[kind]))
            for kind in KINDS
            if kind in marks and (url := samples.url(kind)) is not None
        ]
        # vLLM 0.30 on CPU: embeddings and tokens in one batch crash an engine with adapters.
        vectors = embeds.smallest() if embeds is not None and engine.facts.adapters is None else None
        return trials.TrialInputs(salt, tuple(seen), vectors)

    async def _rank(self, rank: int, made: trials.Trials, adapter: Adapter | None) -> None:
        await self._ask(made.plain, rank)
        began = time.monotonic()  # time the second one: the first may have built something
        await self._ask(made.plain, rank)
        seconds = time.monotonic() - began
        kinds: list[tuple[Trial, Adapter | None]] = [(trial, None) for trial in made.short]
        if adapter is not None:
            kinds.append((dataclasses.replace(made.plain, kind="adapter"), adapter))
        if self._warming.engine.facts.compiles_kernels and seconds * len(kinds) < ALONE_SECONDS:
            for trial, with_adapter in kinds:
                await self._try(trial, rank, with_adapter)
        fit = [(trial, one) for trial, one in kinds if trial.kind not in self._refused]
        self._is_together = True
        await _together(self._try(trial, rank, one) for trial, one in fit)
        self._is_together = False
        longest = await self._longer(made.longer, rank, seconds)
        self.speeds.append(await self._speed(longest, rank, seconds))

    async def _longer(self, longer: Iterable[Trial], rank: int, seconds: float) -> Trial | None:
        """Each is expected to take longer in proportion to its prompt. Return the last one."""
        longest = None
        for trial in longer:
            if seconds * trials.LONGER > LONGER_SECONDS:
                break
            began = time.monotonic()
            await self._try(trial, rank)
            seconds = time.monotonic() - began
            if trial.kind not in self._refused:
                longest = trial
        return longest

    async def _speed(self, longest: Trial | None, rank: int, plain_seconds: float) -> float:
        """Time the longest prompt again, with another salt: now nothing is built for it, nor cached."""
        step = max(plain_seconds / trials.TOKENS, 1e-6)
        if longest is None or longest.prompt_tokens is None:
            return trials.SHORT / step
        again = self._warming.role.trials(self._given()).longer
        began = time.monotonic()
        await self._try(next(trial for trial in again if trial.kind == longest.kind), rank)
        seconds = time.monotonic() - began
        return longest.prompt_tokens / max(seconds - step, seconds / 2)

    async def _try(self, trial: Trial, rank: int, adapter: Adapter | None = None) -> None:
        """Log each refusal once, whichever rank it comes from."""
        try:
            await self._ask(trial, rank, adapter)
        except EngineDead:
            raise
        except DynamoVllmError as exc:
            if trial.kind not in self._refused:
                # What this worker refuses, it refuses for clients too, so it need not be warm.
                level = logging.INFO if isinstance(exc, RequestError) else logging.WARNING
                logger.log(level, "warm-up: skipped requests of the kind %s: %s", trial.kind, exc)
            self._refused.add(trial.kind)

    async def _ask(self, trial: Trial, rank: int, adapter: Adapter | None = None) -> None:
        """Run a request as `Service.generate` does, without a client."""
        role, facts = self._warming.role, self._warming.engine.facts
        self._report_if_slow(trial.kind)
        self.tried += 1
        with held_by_request():
            parsed = role.parse(trial.request)
            job = await role.prepare(parsed, f"warm-up-{next(self._numbers)}", adapter)
            if facts.data_parallel_size > 1:
                job = dataclasses.replace(job, data_parallel_rank=rank)
            encoder = role.encoder(parsed, job)

            def sink(output: Output) -> None:
                encoder.encode(output)

            if job.answer is None:
                await self._warming.engine.stream(job, sink)

    @contextlib.asynccontextmanager
    async def _adapter(self) -> AsyncIterator[Adapter | None]:
        """Return an adapter that changes nothing; None if LoRA is off, or if the engine refuses such an
        adapter."""
        warming, limits = self._warming, self._warming.engine.facts.adapters
        if limits is None or warming.adapter_base is None:
            yield None
            return
        folder = warming.scratch / "warm-up-adapter"
        adapter = Adapter("warm-up", _ADAPTER_ID, str(folder), "warm-up")
        try:
            await asyncio.to_thread(sample.write, folder, warming.adapter_base, limits.max_rank)
            await warming.operations.control(AddAdapter(adapter))
        except AdminError as exc:
            logger.warning("warm-up: skipped requests with an adapter: %s", exc)
            yield None
            return
        try:
            yield adapter
        finally:
            with contextlib.suppress(EngineDead):  # which ends the start all the same
                await warming.operations.control(RemoveAdapter(adapter))

    def _report_if_slow(self, kind: str) -> None:
        self.cancel_report()
        self.current = kind = "all kinds at once" if self._is_together else kind
        loop = asyncio.get_running_loop()
        self._report_timer = loop.call_later(REPORT_SECONDS, self._warming.on_phase, f"warming: {kind}")

    def cancel_report(self) -> None:
        if self._report_timer is not None:
            self._report_timer.cancel()
