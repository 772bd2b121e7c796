"""Verbs that change a worker's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from dynamo_vllm.admin.base import Body

if TYPE_CHECKING:
    from dynamo_vllm.admin.base import Controls, Nothing, Reply

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class SleepBody(Body, frozen=True):
    level: Literal[1, 2] = 1
    """1 keeps the weights in host memory, 2 drops them and reads them again."""
    drain_seconds: Seconds | None = None
    """Time for running requests; default: the worker's own."""


class PauseBody(Body, frozen=True):
    mode: Literal["wait", "keep"] = "wait"
    """Let running requests finish first, or freeze them until `resume`."""
    drain_seconds: Seconds | None = None


async def sleep(body: SleepBody, worker: Controls) -> Reply:
    report = await worker.life.sleep(body.level, budget(body.drain_seconds, worker))
    return {
        "level": body.level,
        "seconds": round(report.seconds, 3),
        "freed_bytes": report.freed_bytes,
        "already": report.already,
    }


async def wake_up(_: Nothing, worker: Controls) -> Reply:
    report = await worker.life.wake()
    return {"seconds": round(report.seconds, 3), "already": report.already}


async def pause(body: PauseBody, worker: Controls) -> Reply:
    report = await worker.life.pause(body.mode == "keep", budget(body.drain_seconds, worker))
    return {"mode": body.mode, "seconds": round(report.seconds, 3), "already": report.already}


async def resume(_: Nothing, worker: Controls) -> Reply:
    report = await worker.life.resume()
    return {"seconds": round(report.seconds, 3), "already": report.already}


async def status(_: Nothing, worker: Controls) -> Reply:
    return worker.status()


def budget(asked: float | None, worker: Controls) -> float:
    return worker.drain_seconds if asked is None else asked
