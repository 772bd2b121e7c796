"""Lets a job with a guide into the engine once the guide was judged; a client that leaves ends the wait."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from dynamo_vllm.engine.structured_output.judge import Guides
from dynamo_vllm.engine.structured_output.judge_processes import Source
from dynamo_vllm.forking import CannotFork

if TYPE_CHECKING:
    from dynamo_vllm.engine.structured_output.judge import Limits
    from dynamo_vllm.forking import Zygote
    from dynamo_vllm.job import Job

logger = logging.getLogger(__name__)


class GuideGate:
    """The jobs of one engine whose guides are being judged."""

    def __init__(self, guides: Guides) -> None:
        self._guides = guides
        self._waiting: dict[str, asyncio.Timeout] = {}

    @classmethod
    def opened(
        cls, call: str, payload: bytes, limits: Limits, zygote: Zygote | None, *, at_once: bool = True
    ) -> GuideGate:
        """Its processes begin now, or with the first guide; forked from a zygote they are soon ready."""
        source = Source(call, payload, dict(os.environ))
        if zygote is not None and at_once:
            try:
                source.fork_from(zygote)
            except CannotFork as exc:
                logger.info("what judges guides starts afresh: %s", exc)
        guides = Guides(source, limits)
        if at_once:
            guides.load()
        return cls(guides)

    async def admitted(self, job: Job) -> Job | None:
        """The job with its guide as the engine gets it; None when it was aborted meanwhile."""
        assert job.sampling.guide is not None
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting[job.id] = waiting
                guide = await self._guides.judged(job.sampling.guide)
        except TimeoutError:
            if not waiting.expired():
                raise
            return None
        finally:
            self._waiting.pop(job.id, None)
        return dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, guide=guide))

    def leave(self, job_id: str) -> None:
        """The client is gone, or the job moves to another worker."""
        if (waiting := self._waiting.pop(job_id, None)) is not None:
            waiting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        self._guides.close()
