"""Tests the tiers of KV caches of a running system: each worker that has some loads a prompt from them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli.process import ask_quietly
from dynamo_vllm.cli.running.prove import FAILED, NOT_PROVEN, OK, SKIPPED, ProofStep
from dynamo_vllm.config import runtime_env
from dynamo_vllm.observe import worker_names
from dynamo_vllm.serving.admin import client as admin_client

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.options import FindOptions

NAME = "tiers"


def prove(options: FindOptions, environment: Mapping[str, str]) -> list[ProofStep]:
    folder = options.discovery_folder
    if folder is not None and not folder.is_dir():  # then there are no workers, and no runtime is needed
        return [ProofStep(NAME, SKIPPED, admin_client.no_workers_message(options))]
    runtime_env.export_caller(options, environment)
    steps: list[ProofStep] = []

    async def ask() -> int:
        steps.extend(await _ask(options))
        return 0

    ask_quietly(ask(), environment)
    return steps


async def _ask(options: FindOptions) -> list[ProofStep]:
    try:
        async with admin_client.Workers(options) as workers:
            told = await workers.ask_all("status")
            having: dict[int, Any] = {i: reply["tiers"] for i, reply in told.items() if reply.get("tiers")}
            if not having:
                reason = "no worker has tiers of KV caches; --kv-offload-gb gives it some"
                return [ProofStep(NAME, SKIPPED, reason)]
            names = worker_names.short(workers.found)
            replies = await asyncio.gather(*(workers.ask(instance, "prove_tiers") for instance in having))
            return [
                step(names.get(i, str(i)), reply, any(tier.get("is_paused") for tier in tiers))
                for (i, tiers), reply in zip(having.items(), replies, strict=True)
            ]
    except admin_client.NoWorkers as exc:
        return [ProofStep(NAME, SKIPPED, str(exc))]


def step(worker: str, reply: Mapping[str, Any], is_paused: bool = False) -> ProofStep:
    """Judge what one worker has found out; `is_paused` says that its disk has failed or is full."""
    if reply.get("status") != "success":
        return ProofStep(NAME, FAILED, f"{worker}: {reply.get('message')}")
    ranks = reply["ranks"]
    loaded, asked = (sum(rank[name] for rank in ranks) for name in ("tier_tokens", "prompt_tokens"))
    figure = f"{worker}: {loaded} of {asked} prompt tokens came from its tiers"
    if not all(rank["tier_tokens"] for rank in ranks):
        return ProofStep(
            NAME, FAILED, figure, "is all of it in use by running requests? the worker's log may say more"
        )
    if not all(rank["is_same"] for rank in ranks):
        return ProofStep(NAME, FAILED, f"{figure}, with another answer", "turn the tiers off and report it")
    if is_paused:
        hint = "its disk has failed or is full; the worker's log says more"
        return ProofStep(NAME, NOT_PROVEN, f"{figure}, with the same answer, but its disk is paused", hint)
    return ProofStep(NAME, OK, f"{figure}, with the same answer")
