"""The table of verbs over a real life and the fake engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from dynamo_vllm.admin.base import Controls, WorkerState
from dynamo_vllm.admin.verbs import VERBS, perform
from dynamo_vllm.engine.base import (
    EngineOp,
    ResetCache,
    Sleep,
    StartProfile,
    StopProfile,
    TierFigures,
    TierProof,
)
from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.errors import EngineDead
from dynamo_vllm.serving.admin.adapters import NONE
from dynamo_vllm.serving.lifecycle import states as lifecycle_states
from dynamo_vllm.serving.lifecycle.states import Lifecycle, LifeParts
from harness.fakes import make_worker


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no frontend here that must first hear of a sleep."""
    monkeypatch.setattr(lifecycle_states, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(lifecycle_states, "QUIET_SECONDS", 0.0)


class Alone:
    """Discovery and health of nobody."""

    async def withdraw(self) -> bool:
        return True

    async def restore(self) -> bool:
        return True

    async def remove(self) -> None: ...

    def set_health_status(self, ready: bool) -> None: ...


async def made(engine: Any = None, **changes: Any) -> Controls:
    worker = await make_worker()
    engine, nobody = engine or worker.engine, Alone()

    async def answers() -> None: ...

    life = Lifecycle(LifeParts(nobody, nobody, worker.in_flight, engine, NONE, answers))
    life.ready()
    given: dict[str, Any] = {
        "adapters": None,
        "tiers": None,
        "drain_seconds": 5.0,
        "status": lambda: {"state": life.state.value},
    }
    return Controls(life=life, engine=engine, facts=worker.facts, **{**given, **changes})


def operations(worker: Controls) -> list[EngineOp]:
    assert isinstance(worker.engine, FakeEngine)
    return worker.engine.operations


async def test_sleep_and_wake() -> None:
    worker = await made()
    reply = await perform("sleep", {"level": 2}, worker)
    assert reply.pop("seconds") >= 0
    assert reply == {"status": "success", "level": 2, "freed_bytes": None, "already": False}
    assert operations(worker) == [Sleep(2)]
    assert (await perform("status", {}, worker))["state"] == "asleep"
    assert (await perform("sleep", {"level": 2}, worker))["already"] is True
    assert (await perform("wake_up", None, worker))["already"] is False
    assert worker.life.state is WorkerState.READY


async def test_caches_and_profiles_reach_the_engine() -> None:
    worker = await made()
    await perform("clear_kv_blocks", {}, worker)
    await perform("reset_caches", {"kinds": ["encoder", "multimodal"]}, worker)
    await perform("start_profile", {"prefix": "one"}, worker)
    await perform("stop_profile", {}, worker)
    assert operations(worker) == [
        ResetCache(frozenset({"prefix"})),
        ResetCache(frozenset({"encoder", "multimodal"})),
        StartProfile("one"),
        StopProfile(),
    ]


@pytest.mark.parametrize(
    ("verb", "body", "said"),
    [
        ("slep", {}, "'slep' is not a verb; there are load_lora"),
        ("sleep", {"level": 3}, "level: invalid enum value 3"),
        ("sleep", {"levle": 1}, "object contains unknown field `levle`"),
        ("sleep", {"drain_seconds": -1}, "drain_seconds: expected `float` >= 0"),
        ("sleep", [1], "request: expected `object`, got `array`"),
        ("pause", {"mode": "hold"}, "mode: invalid enum value 'hold'"),
        ("reset_caches", {"kinds": ["all"]}, "kinds[0]: invalid enum value 'all'"),
        ("start_profile", {"prefix": "../x"}, "prefix: expected `str` matching regex"),
        ("load_lora", {"lora_name": "a"}, "object missing required field `source`"),
    ],
)
async def test_body_that_means_nothing(verb: str, body: object, said: str) -> None:
    reply = await perform(verb, body, await made())
    assert (reply["status"], reply["error"], reply["code"]) == ("error", "bad_command", 400)
    assert said in reply["message"]


async def test_sleeping_engine_is_not_touched() -> None:
    worker = await made()
    await perform("sleep", {}, worker)
    for verb in ("clear_kv_blocks", "start_profile", "reset_caches"):
        reply = await perform(verb, {}, worker)
        assert (reply["error"], reply["code"]) == ("wrong_state", 409)
        assert f"this worker is asleep; {verb} needs it" in reply["message"]
    assert operations(worker) == [Sleep(1)]


async def test_worker_without_adapters_or_tiers_says_how_to_have_some() -> None:
    worker = await made()
    reply = await perform("load_lora", {"lora_name": "a", "source": {"uri": "/x"}}, worker)
    assert reply["code"] == 409 and "--enable-lora" in reply["message"]
    assert (await perform("list_loras", {}, worker))["loras"] == []
    reply = await perform("prove_tiers", {}, worker)
    assert reply["code"] == 409 and "--kv-offload-gb" in reply["message"]


class Broken:
    def __init__(self, exc: Exception) -> None:
        self.exc = exc

    async def control(self, op: EngineOp) -> int | None:
        raise self.exc


async def test_unexpected_error_tells_nothing_of_its_text() -> None:
    reply = await perform("clear_kv_blocks", {}, await made(Broken(RuntimeError("/secret/path"))))
    message = "it failed; the worker's log says why"
    assert reply == {"status": "error", "error": "failed", "message": message, "code": 500}


async def test_dead_engine_ends_the_worker() -> None:
    deaths: list[EngineDead] = []
    reply = await perform("clear_kv_blocks", {}, await made(Broken(EngineDead("gone"))), deaths.append)
    assert reply["code"] == 500 and [str(exc) for exc in deaths] == ["gone"]


def test_every_verb_says_what_it_does() -> None:
    assert all(verb.help and verb.name == name for name, verb in VERBS.items())


class TwoRanks:
    """Tiers of two ranks, of which one gives back nothing."""

    sizes: Mapping[str, int] = {"host": 1000}

    def figures(self) -> list[TierFigures]:
        return []

    async def prove(self, rank: int) -> TierProof:
        return TierProof(rank, 129, 128 if rank else 0, True)


async def test_tiers_of_every_rank_are_proven() -> None:
    worker = await made(tiers=TwoRanks())
    facts = dataclasses.replace(worker.facts, data_parallel_size=2)
    reply = await perform("prove_tiers", {}, dataclasses.replace(worker, facts=facts))
    assert [(rank["rank"], rank["tier_tokens"]) for rank in reply["ranks"]] == [(0, 0), (1, 128)]
