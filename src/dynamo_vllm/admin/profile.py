"""Verbs that profile an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from dynamo_vllm.admin.base import Body
from dynamo_vllm.engine.base import StartProfile, StopProfile
from dynamo_vllm.errors import WrongState

if TYPE_CHECKING:
    from dynamo_vllm.admin.base import Controls, Nothing, Reply

# It becomes part of a file's name.
Prefix = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class ProfileBody(Body, frozen=True):
    prefix: Prefix | None = None


async def start_profile(body: ProfileBody, worker: Controls) -> Reply:
    refuse_without_profiler(worker)
    await worker.engine.control(StartProfile(body.prefix))
    return {"folder": worker.facts.profile_folder}


async def stop_profile(_: Nothing, worker: Controls) -> Reply:
    refuse_without_profiler(worker)
    await worker.engine.control(StopProfile())
    return {"folder": worker.facts.profile_folder}


def refuse_without_profiler(worker: Controls) -> None:
    if worker.facts.profile_folder is None:
        raise WrongState(
            "this worker has no profiler; start it with --profiler-config "
            '\'{"profiler": "torch", "torch_profiler_dir": "FOLDER"}\''
        )
