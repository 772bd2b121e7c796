"""Holds back jobs with a guide until the guide has been checked; an abort ends the wait."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from dynamo_vllm.engine.structured_output.checker import GuideChecker
from dynamo_vllm.engine.structured_output.checker_processes import Source
from dynamo_vllm.forking import CannotFork

if TYPE_CHECKING:
    from dynamo_vllm.engine.structured_output.checker import Limits
    from dynamo_vllm.forking import Zygote
    from dynamo_vllm.job import Job

logger = logging.getLogger(__name__)


class GuideGate:
    """Tracks the jobs of one engine whose guides are being checked."""

    def __init__(self, guides: GuideChecker) -> None:
        self._guides = guides
        self._waiting: dict[str, asyncio.Timeout] = {}

    @classmethod
    def opened(
        cls, call: str, payload: bytes, limits: Limits, zygote: Zygote | None, *, at_once: bool = True
    ) -> GuideGate:
        """Creates a gate. Its processes start now (`at_once`) or with the first guide.

        If there is a zygote that has imported vLLM, they are forked from it and are ready sooner.
        """
        source = Source(call, payload, dict(os.environ))
        if zygote is not None and at_once:
            try:
                source.fork_from(zygote)
            except CannotFork as exc:
                logger.info("guide checkers are started as new processes: %s", exc)
        guides = GuideChecker(source, limits)
        if at_once:
            guides.load()
        return cls(guides)

    async def admitted(self, job: Job) -> Job | None:
        """Returns the job with its guide as the engine should get it; None if the job was aborted."""
        assert job.sampling.guide is not None
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting[job.id] = waiting
                guide = await self._guides.checked(job.sampling.guide)
        except TimeoutError:
            if not waiting.expired():
                raise
            return None
        finally:
            self._waiting.pop(job.id, None)
        return dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, guide=guide))

    def leave(self, job_id: str) -> None:
        """Ends the wait of a job that was aborted."""
        if (waiting := self._waiting.pop(job_id, None)) is not None:
            waiting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        self._guides.close()
