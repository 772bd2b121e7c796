"""The worker's place in a discovery that is away or slow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_vllm.config import build
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.role_cards import RoleCard
from dynamo_vllm.roles import aggregated, prefill, text
from dynamo_vllm.serving.plane import registration as endpoints
from dynamo_vllm.serving.plane.registration import Registration
from harness.fakes import make_worker

INSTANCE, CARD = "instance", "card"


class Discovery:
    """What it holds; a step in `slow` is done and never answered, one in `away` is not done."""

    def __init__(self) -> None:
        self.holds = {INSTANCE}
        self.slow: set[str] = set()
        self.away: set[str] = set()
        self.cards: list[dict[str, Any]] = []

    async def step(self, verb: str, what: str) -> None:
        name = f"{verb} {what}"
        if name in self.away:
            raise RuntimeError("discovery is away")
        if verb == "remove" and what not in self.holds:
            raise RuntimeError("Could not find key" if what == CARD else "it is not there")
        (self.holds.add if verb == "put" else self.holds.remove)(what)
        if name in self.slow:
            await asyncio.Event().wait()

    async def register_endpoint_instance(self) -> None:
        await self.step("put", INSTANCE)

    async def unregister_endpoint_instance(self) -> None:
        await self.step("remove", INSTANCE)


@pytest.fixture
def discovery(monkeypatch: pytest.MonkeyPatch) -> Discovery:
    made = Discovery()

    async def register(*_: Any, **card: Any) -> None:
        made.cards.append(card)
        await made.step("put", CARD)

    async def unregister(*_: Any) -> None:
        await made.step("remove", CARD)

    monkeypatch.setattr(endpoints, "register_model", register)
    monkeypatch.setattr(endpoints, "unregister_model", unregister)
    monkeypatch.setattr(endpoints, "DISCOVERY_SECONDS", 0.05)
    monkeypatch.setattr(endpoints, "FORGET_SECONDS", 0.0)
    return made


async def listed(discovery: Discovery, card: RoleCard = aggregated.CARD, *flags: str) -> Registration:
    options, _ = build.parse(WorkerOptions, ["--model", "m", *flags], {}, "worker", "")
    endpoint: Any = discovery
    registration = Registration(endpoint, options, card, (await make_worker()).facts, "unused")
    await registration.publish()
    return registration


@pytest.mark.parametrize(("speed", "unit"), [(None, 4096), (2500.4, 2500), (0.1, 1)])
async def test_unit_of_the_routers_queue_is_what_the_engine_computes_in_a_second(
    discovery: Discovery, speed: float | None, unit: int
) -> None:
    registration = await listed(discovery)
    registration.prompt_tokens_per_second = speed
    await registration.publish()
    assert discovery.cards[-1]["runtime_config"].max_num_batched_tokens == unit


@pytest.mark.parametrize("is_the_end", [False, True])
async def test_withdrawal_that_failed_is_tried_anew(discovery: Discovery, is_the_end: bool) -> None:
    registration = await listed(discovery)
    discovery.away = {"remove instance"}
    assert not await registration.withdraw()
    assert INSTANCE in discovery.holds
    discovery.away.clear()
    if is_the_end:
        await registration.remove()
        assert discovery.holds == set()
    else:
        assert await registration.withdraw()
        assert discovery.holds == {CARD}
        assert await registration.withdraw(), "what is gone is not asked for again"


async def test_withdrawal_whose_end_was_not_seen_does_not_keep_the_worker_out(discovery: Discovery) -> None:
    registration = await listed(discovery)
    discovery.slow = {"remove instance"}
    assert not await registration.withdraw()
    assert await registration.restore()
    assert INSTANCE in discovery.holds


@pytest.mark.parametrize("is_cut_short", [False, True], ids=["timed out", "cancelled"])
async def test_end_takes_out_what_a_return_left(discovery: Discovery, is_cut_short: bool) -> None:
    """Discovery has it, and nobody was told."""
    registration = await listed(discovery)
    await registration.withdraw()
    discovery.slow = {"put instance"}
    returning = asyncio.create_task(registration.restore())
    while INSTANCE not in discovery.holds:
        await asyncio.sleep(0)
    if is_cut_short:
        returning.cancel()
    await asyncio.wait({returning})
    assert returning.cancelled() if is_cut_short else not returning.result()
    await registration.remove()
    assert discovery.holds == set()


@pytest.mark.parametrize(("card", "told"), [(aggregated.CARD, "hermes"), (text.CARD, None)])
async def test_frontend_is_told_of_parsers_for_tokens_only(
    discovery: Discovery, card: RoleCard, told: str | None
) -> None:
    """Of text it parses whole answers and no streams."""
    await listed(discovery, card, "--tool-call-parser", "hermes")
    assert [registered["runtime_config"].tool_call_parser for registered in discovery.cards] == [told]


async def test_worker_that_helps_others_leaves_with_its_card(discovery: Discovery) -> None:
    registration = await listed(discovery, prefill.CARD)
    discovery.slow = {"remove card"}
    assert not await registration.withdraw(), "its card may still be there"
    assert discovery.holds == set()
    assert await registration.withdraw()
    assert await registration.restore()
    assert discovery.holds == {INSTANCE, CARD}
