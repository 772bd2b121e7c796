"""The registry of adapters over steps that record what is done to them and wait or fail on demand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_vllm.errors import (
    AdapterConflict,
    AdapterRefused,
    AdapterUnknown,
    BadCommand,
    DynamoVllmError,
    NoRoom,
    SourceFailed,
    UnknownModel,
    WrongState,
)
from dynamo_vllm.job import Adapter
from dynamo_vllm.lora import registry as registry_module
from dynamo_vllm.lora.base import AdapterFacts, Fetched, OnProgress
from dynamo_vllm.lora.registry import Registry
from dynamo_vllm.lora.slots import AdapterEntry, AdapterState, Lease

T = TypeVar("T")
FACTS = AdapterFacts(rank=8, alpha=16, modules=("q_proj",), bytes=100, base_name="tiny")


class Gate:
    """A step that was told to wait here."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()


class Record:
    """Steps over nothing: an engine and a discovery that are sets, sources whose content can change."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.content: dict[str, str] = {}
        self.engine: dict[int, Adapter] = {}
        self.published: dict[str, Adapter] = {}
        self.most_in_engine = 0
        self.failed: Counter[str] = Counter()
        self.gates: dict[str, Gate] = {}
        self.faults: dict[str, list[BaseException]] = {}

    def hold(self, step: str) -> Gate:
        """The next call of the step waits for its gate."""
        gate = self.gates[step] = Gate()
        return gate

    def fail(self, step: str, *errors: BaseException) -> None:
        """The next calls of the step raise these, after what they do was done."""
        self.faults[step] = list(errors)

    def count(self, step: str) -> int:
        return sum(called == step for called, _ in self.calls)

    async def _step(self, step: str, name: str) -> None:
        self.calls.append((step, name))
        await asyncio.sleep(0)  # as every real step: others run meanwhile
        gate = self.gates.pop(step, None)
        if gate is not None:
            gate.reached.set()
            await gate.opened.wait()
        if self.faults.get(step):
            self.failed[step] += 1
            raise self.faults[step].pop(0)

    async def fetch(self, name: str, uri: str, on_progress: OnProgress) -> Fetched:
        on_progress(40, 100)
        await self._step("fetch", name)
        return Fetched(Path("/adapters", uri.strip("/")), self.content.get(uri, uri), 100)

    async def verify(self, fetched: Fetched) -> AdapterFacts:
        await self._step("verify", fetched.path.name)
        return FACTS

    async def add(self, adapter: Adapter) -> None:
        self.engine[adapter.id] = adapter
        self.most_in_engine = max(self.most_in_engine, len(self.engine))
        await self._step("add", adapter.name)

    async def remove(self, adapter: Adapter) -> None:
        await self._step("remove", adapter.name)
        self.engine.pop(adapter.id, None)

    async def publish(self, adapter: Adapter) -> None:
        assert adapter.id in self.engine
        self.published[adapter.name] = adapter
        await self._step("publish", adapter.name)

    async def withdraw(self, adapter: Adapter) -> None:
        await self._step("withdraw", adapter.name)
        self.published.pop(adapter.name, None)


def make(capacity: int = 4, **more: Any) -> tuple[Registry, Record]:
    record = Record()
    return Registry(record, capacity, **more), record


async def loaded(*names: str, **more: Any) -> tuple[Registry, Record]:
    registry, record = make(**more)
    for name in names:
        await registry.load(name, f"/{name}")
    return registry, record


async def held(record: Record, step: str, act: Coroutine[Any, Any, T]) -> tuple[Gate, asyncio.Task[T]]:
    """The act has begun and waits in this step."""
    gate, task = record.hold(step), asyncio.create_task(act)
    await gate.reached.wait()
    return gate, task


def only(registry: Registry) -> AdapterEntry:
    (entry,) = registry.entries()
    return entry


async def passes() -> None:
    """Everything that can run has run."""
    for _ in range(50):
        await asyncio.sleep(0)


# -- loading ---------------------------------------------------------------------------------------


async def test_load_goes_through_the_steps_in_order() -> None:
    registry, record = make()
    entry = await registry.load("sql", "/sql")
    assert [step for step, _ in record.calls] == ["fetch", "verify", "add", "publish"]
    assert entry == only(registry)
    assert (entry.name, entry.uri, entry.state, entry.id) == ("sql", "/sql", AdapterState.LOADED, 1)
    assert (entry.done_bytes, entry.total_bytes, entry.facts) == (40, 100, FACTS)
    assert entry.is_published and not entry.already_loaded and entry.error is None
    assert record.engine[1] == Adapter("sql", 1, "/adapters/sql", "sql#/sql", content="/sql")


@pytest.mark.parametrize(
    ("step", "state"),
    [
        ("fetch", AdapterState.FETCHING),
        ("verify", AdapterState.VERIFYING),
        ("add", AdapterState.ADDING),
        ("publish", AdapterState.PUBLISHING),
    ],
)
async def test_load_in_progress_is_visible(step: str, state: AdapterState) -> None:
    registry, record = make()
    gate, load = await held(record, step, registry.load("sql", "/sql"))
    assert (only(registry).state, only(registry).done_bytes) == (state, 40)
    gate.opened.set()
    assert (await load).state is AdapterState.LOADED


async def test_fifty_loads_of_one_name_do_the_work_once() -> None:
    registry, record = make()
    entries = await asyncio.gather(*(registry.load("sql", "/sql") for _ in range(50)))
    assert Counter(step for step, _ in record.calls) == Counter(fetch=1, verify=1, add=1, publish=1)
    assert {entry.id for entry in entries} == {1}


async def test_same_content_again_is_already_loaded() -> None:
    registry, record = await loaded("sql")
    record.content["s3://b/sql"] = "/sql"
    for uri in ("/sql", "s3://b/sql"):
        entry = await registry.load("sql", uri)
        assert entry.already_loaded and entry.id == 1
    assert record.count("add") == record.count("publish") == 1


async def test_other_content_under_a_loaded_name_is_a_conflict() -> None:
    registry, record = await loaded("sql")
    record.content["/sql"] = "changed"
    with pytest.raises(AdapterConflict, match="unload it first"):
        await registry.load("sql", "/sql")
    assert only(registry).state is AdapterState.LOADED and registry.lease("sql").adapter.id == 1


async def test_source_that_is_gone_leaves_a_loaded_adapter_alone() -> None:
    registry, record = await loaded("sql")
    record.fail("fetch", SourceFailed("gone"))
    with pytest.raises(SourceFailed):
        await registry.load("sql", "/sql")
    assert (only(registry).state, only(registry).error) == (AdapterState.LOADED, None)


async def test_odd_names_are_refused_and_usual_ones_are_taken() -> None:
    registry, record = make(capacity=9)
    odd = ["", "a b", "a/../b", "../a", "a//b", "/a", "a/", ".", "é", "a#2", "a\n", "_", "._:", "x" * 201]
    for name in odd:
        with pytest.raises(BadCommand, match="letters, digits"):
            await registry.load(name, "/sql")
    assert record.calls == [] and registry.entries() == []
    for name in ("sql", "org/sql-v1.2:latest", "a..b", "x" * 200):
        assert (await registry.load(name, "/sql")).name == name


@pytest.mark.parametrize(("longest", "longer"), [("x" * 13, "x" * 14), ("a.b.c.d", "a.b.c.dd")])
async def test_name_that_discovery_has_no_room_for_is_refused(longest: str, longer: str) -> None:
    registry, record = make(room=13)
    await registry.load(longest, "/sql")
    calls = list(record.calls)
    with pytest.raises(BadCommand, match=r"takes 14 bytes, .* leaves 13; use a shorter name"):
        await registry.load(longer, "/sql")
    assert record.calls == calls


async def test_name_of_the_base_model_is_refused() -> None:
    registry, record = make(reserved=["tiny"])
    with pytest.raises(AdapterConflict, match="base model's name"):
        await registry.load("tiny", "/sql")
    assert record.calls == []


@pytest.mark.parametrize("other", ["a_b", "A.B", "_a.b", "a/b"])
async def test_name_that_discovery_cannot_tell_from_a_loaded_one_is_a_conflict(other: str) -> None:
    registry, record = make()
    await registry.load("a.b", "/one")
    with pytest.raises(AdapterConflict, match="'a.b'"):
        await registry.load(other, "/two")
    assert list(record.published) == [entry.name for entry in registry.entries()] == ["a.b"]
    await registry.unload("a.b")
    await registry.load(other, "/two")
    assert list(record.published) == [other]


async def test_two_names_for_one_card_at_once_are_one_adapter_and_a_conflict() -> None:
    registry, record = make()
    loads = (registry.load("a.b", "/one"), registry.load("a_b", "/two"))
    both = await asyncio.gather(*loads, return_exceptions=True)
    assert [type(result) for result in both] == [AdapterEntry, AdapterConflict]
    assert list(record.published) == ["a.b"]


@pytest.mark.parametrize(
    ("fault", "state", "error"),
    [
        ((), AdapterState.LOADED, None),
        ((SourceFailed("no such bucket"),), AdapterState.FAILED, "no such bucket"),
    ],
)
async def test_load_goes_on_without_its_caller_and_its_failure_is_kept(
    fault: tuple[SourceFailed, ...], state: AdapterState, error: str | None
) -> None:
    registry, record = make()
    record.fail("fetch", *fault)
    gate, caller = await held(record, "fetch", registry.load("sql", "/sql"))
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    gate.opened.set()
    await passes()
    assert (only(registry).state, only(registry).error) == (state, error)
    assert record.count("add") == (not fault)


# -- room ------------------------------------------------------------------------------------------


async def test_loads_in_progress_count() -> None:
    registry, record = await loaded("a", capacity=2)
    gate, load = await held(record, "fetch", registry.load("b", "/b"))
    with pytest.raises(NoRoom, match="2 of 2 adapters.*--max-loras"):
        await registry.load("c", "/c")
    assert [entry.name for entry in registry.entries()] == ["a", "b"]
    gate.opened.set()
    await load
    assert record.most_in_engine == 2


async def test_unloading_keeps_its_place_until_it_is_out_of_the_engine() -> None:
    registry, record = await loaded("a", capacity=1)
    gate, unload = await held(record, "remove", registry.unload("a"))
    with pytest.raises(NoRoom):
        await registry.load("b", "/b")
    gate.opened.set()
    await unload
    assert (await registry.load("b", "/b")).state is AdapterState.LOADED


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "undone"),
    [
        ("fetch", []),
        ("verify", []),
        ("add", ["remove"]),
        ("publish", ["withdraw", "remove"]),
    ],
)
async def test_failing_step_is_rolled_back_and_takes_no_place(step: str, undone: list[str]) -> None:
    registry, record = make(capacity=1)
    record.fail(step, AdapterRefused("no good"))
    with pytest.raises(AdapterRefused, match="no good"):
        await registry.load("sql", "/sql")
    done = [called for called, _ in record.calls]
    assert done[done.index(step) + 1 :] == undone
    assert not record.engine and not record.published
    assert (only(registry).state, only(registry).error) == (AdapterState.FAILED, "no good")
    with pytest.raises(UnknownModel):
        registry.lease("sql")
    assert (await registry.load("other", "/other")).state is AdapterState.LOADED


async def test_name_of_a_failed_load_is_free_for_the_next_one_or_forgotten() -> None:
    registry, record = make()

    async def fail() -> None:
        record.fail("verify", AdapterRefused("no good"))
        with pytest.raises(AdapterRefused):
            await registry.load("a.b", "/one")

    await fail()
    assert (await registry.load("a.b", "/one")).error is None
    assert only(registry).state is AdapterState.LOADED
    await registry.unload("a.b")
    await fail()
    await registry.unload("a.b")
    assert registry.entries() == []
    await fail()
    await registry.load("a_b", "/two")
    assert list(record.published) == ["a_b"] and registry.failures == 3


async def test_only_the_newest_failures_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_FAILED", 2)
    registry, record = make()
    for name in ("z", "b", "c", "z"):
        record.fail("fetch", SourceFailed("gone"))
        with pytest.raises(SourceFailed):
            await registry.load(name, "/x")
    assert [entry.name for entry in registry.entries()] == ["c", "z"]


async def test_request_that_came_before_publishing_failed_is_waited_for() -> None:
    registry, record = make()
    record.fail("publish", RuntimeError("discovery is gone"))
    gate, load = await held(record, "publish", registry.load("sql", "/sql"))
    lease = registry.lease("sql")
    gate.opened.set()
    await passes()
    assert record.count("withdraw") == 1 and record.count("remove") == 0
    lease.release()
    with pytest.raises(RuntimeError):
        await load
    assert record.engine == {}


async def test_what_the_engine_does_not_let_go_keeps_its_place_and_is_removed_first() -> None:
    registry, record = make(capacity=1)
    record.fail("add", AdapterRefused("no good"))
    record.fail("remove", RuntimeError("busy"))
    with pytest.raises(AdapterRefused):
        await registry.load("a", "/a")
    with pytest.raises(NoRoom):
        await registry.load("b", "/b")
    assert (await registry.load("a", "/a2")).state is AdapterState.LOADED
    assert [step for step, _ in record.calls][-5:] == ["remove", "fetch", "verify", "add", "publish"]
    assert record.most_in_engine == 1


async def test_what_discovery_does_not_let_go_is_withdrawn_by_the_next_unload() -> None:
    registry, record = make()
    record.fail("publish", RuntimeError("lost"))
    record.fail("withdraw", RuntimeError("lost"))
    with pytest.raises(RuntimeError):
        await registry.load("sql", "/sql")
    assert record.engine == {} and set(record.published) == {"sql"}
    await registry.unload("sql")
    assert record.published == {}


# -- identity --------------------------------------------------------------------------------------


async def test_new_content_gets_a_new_id_and_engine_name_and_old_content_its_own_again() -> None:
    registry, record = make()

    async def load(name: str, content: str) -> tuple[int, str]:
        record.content["/x"] = content
        await registry.load(name, "/x")
        lease = registry.lease(name)
        lease.release()
        return lease.adapter.id, lease.adapter.engine_name

    seen = []
    for content in ("one", "two", "one", "three"):
        seen.append(await load("sql", content))
        await registry.unload("sql")
    assert seen == [(1, "sql#one"), (2, "sql#two"), (1, "sql#one"), (3, "sql#three")]
    assert await load("other", "one") == (4, "other#one")


async def test_engine_name_says_the_content_also_after_a_restart() -> None:
    """A KV cache on disk outlives the worker, and a path may have other content by then."""
    names = []
    for content in ("old", "new", "old"):
        registry, record = make()  # a new worker
        record.content["/sql"] = content
        await registry.load("sql", "/sql")
        names.append(registry.lease("sql").adapter.engine_name)
    assert names == ["sql#old", "sql#new", "sql#old"]


# -- leases and unload -----------------------------------------------------------------------------


async def test_unload_withdraws_then_waits_for_leases_then_removes() -> None:
    registry, record = await loaded("sql")
    first, second = registry.lease("sql"), registry.lease("sql")
    assert only(registry).leases == 2
    unload = asyncio.create_task(registry.unload("sql"))
    await passes()
    assert record.published == {} and only(registry).state is AdapterState.UNLOADING
    first.release()
    first.release()
    await passes()
    assert record.count("remove") == 0 and only(registry).leases == 1
    second.release()
    await unload
    assert record.engine == {} and registry.entries() == []


async def test_leases_are_granted_while_an_unload_settles_and_refused_afterwards() -> None:
    settling, settled = asyncio.Event(), asyncio.Event()
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        settling.set()
        await settled.wait()

    registry, record = make(settle_seconds=2.5, sleep=sleep)
    await registry.load("sql", "/sql")
    unload = asyncio.create_task(registry.unload("sql"))
    await settling.wait()
    assert record.published == {} and asked == [2.5]
    late = registry.lease("sql")
    settled.set()
    await passes()
    with pytest.raises(UnknownModel, match="'sql'"):
        registry.lease("sql")
    assert record.count("remove") == 0
    late.release()
    await unload


async def test_unknown_name_is_the_clients_404_and_the_operator_hears_what_is_loaded() -> None:
    registry, _ = await loaded("sql")
    with pytest.raises(UnknownModel) as caught:
        registry.lease("pql")
    assert (caught.value.status, caught.value.parameter) == (404, "model")
    with pytest.raises(AdapterUnknown, match="'pql'; loaded: sql"):
        await registry.unload("pql")


async def test_unloads_at_the_same_time_all_succeed_and_a_later_one_does_not() -> None:
    registry, record = await loaded("sql")
    await asyncio.gather(*(registry.unload("sql") for _ in range(5)))
    assert record.count("withdraw") == record.count("remove") == 1
    with pytest.raises(AdapterUnknown):
        await registry.unload("sql")


async def test_load_waits_for_an_unload_of_the_name_and_does_not_join_an_older_load() -> None:
    registry, record = make()
    gate, first = await held(record, "fetch", registry.load("sql", "/sql"))
    unload = asyncio.create_task(registry.unload("sql"))
    await passes()
    second = asyncio.create_task(registry.load("sql", "/sql"))
    await passes()
    gate.opened.set()
    await asyncio.gather(first, unload, second)
    assert only(registry).state is AdapterState.LOADED and record.count("add") == 2


async def test_caller_of_unload_that_goes_away_does_not_stop_it() -> None:
    registry, record = await loaded("sql")
    lease = registry.lease("sql")
    caller = asyncio.create_task(registry.unload("sql"))
    await passes()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    lease.release()
    await passes()
    assert record.engine == {} and registry.entries() == []


async def test_unload_whose_withdrawal_fails_leaves_it_loaded() -> None:
    registry, record = await loaded("sql")
    record.fail("withdraw", RuntimeError("discovery is gone"))
    with pytest.raises(RuntimeError):
        await registry.unload("sql")
    assert only(registry).state is AdapterState.LOADED and only(registry).is_published
    registry.lease("sql").release()
    await registry.unload("sql")


async def test_unload_whose_removal_fails_can_be_repeated() -> None:
    registry, record = await loaded("sql", capacity=1)
    record.fail("remove", RuntimeError("busy"))
    with pytest.raises(RuntimeError):
        await registry.unload("sql")
    assert only(registry).state is AdapterState.FAILED and "unload it again: busy" in (
        only(registry).error or ""
    )
    with pytest.raises(NoRoom):
        await registry.load("other", "/other")
    await registry.unload("sql")
    assert registry.entries() == [] and record.engine == {}


# -- sleep and wake --------------------------------------------------------------------------------


async def test_sleep_hides_all_and_wake_shows_them_again() -> None:
    registry, record = await loaded("a", "b")
    assert await registry.withdraw_all() == {}
    assert record.published == {} and len(record.engine) == 2
    assert [entry.is_published for entry in registry.entries()] == [False, False]
    assert await registry.publish_all() == {}
    assert set(record.published) == {"a", "b"}


async def test_nothing_is_loaded_while_hidden_but_what_is_there_is_still_known() -> None:
    registry, record = await loaded("a")
    await registry.withdraw_all()
    with pytest.raises(WrongState, match="when it is back"):
        await registry.load("b", "/b")
    assert (await registry.load("a", "/a")).already_loaded
    assert record.published == {}
    await registry.unload("a")
    assert record.count("withdraw") == 1 and record.engine == {}


@pytest.mark.parametrize("step", ["fetch", "add"])
async def test_hiding_waits_for_no_load_before_the_engine_has_it_and_the_load_fails(step: str) -> None:
    registry, record = make()
    gate, load = await held(record, step, registry.load("a", "/a"))
    assert await registry.withdraw_all() == {}
    gate.opened.set()
    with pytest.raises(WrongState):
        await load
    assert not record.engine and not record.published


async def test_hiding_waits_for_a_load_that_is_in_the_engine() -> None:
    registry, record = make()
    gate, load = await held(record, "publish", registry.load("a", "/a"))
    hiding = asyncio.create_task(registry.withdraw_all())
    await passes()
    gate.opened.set()
    await load
    assert await hiding == {} and record.published == {}


async def test_unload_that_waits_for_requests_holds_up_neither_hiding_nor_showing() -> None:
    registry, record = await loaded("a", "b")
    lease = registry.lease("a")
    unload = asyncio.create_task(registry.unload("a"))
    await passes()
    assert await asyncio.wait_for(registry.withdraw_all(), 30) == {}
    assert await asyncio.wait_for(registry.publish_all(), 30) == {}
    assert set(record.published) == {"b"} and not unload.done()
    lease.release()
    await unload
    assert [adapter.name for adapter in record.engine.values()] == ["b"]


async def test_all_are_withdrawn_at_once() -> None:
    """Where discovery is away each takes until its deadline, and the worker may have to end."""
    registry, record = await loaded("a", "b")
    gate, hiding = await held(record, "withdraw", registry.withdraw_all())
    await passes()
    assert set(record.published) == {"a"}
    gate.opened.set()
    assert await hiding == {}


async def test_what_was_asked_for_is_a_change_before_it_begins() -> None:
    registry, _ = make()
    load = asyncio.create_task(registry.load("a", "/a"))
    await asyncio.sleep(0)
    assert (registry.entries(), registry.changing()) == ([], "a")
    await load
    assert registry.changing() is None


async def test_one_that_cannot_be_published_is_reported_and_the_next_load_publishes_it() -> None:
    registry, record = await loaded("a", "b")
    await registry.withdraw_all()
    record.fail("publish", RuntimeError("discovery is gone"))
    assert await registry.publish_all() == {"a": "discovery is gone"}
    assert [entry.is_published for entry in registry.entries()] == [False, True]
    await registry.load("a", "/a")
    assert registry.entries()[0].is_published


async def test_add_all_gives_the_engine_the_same_adapters_again() -> None:
    registry, record = await loaded("a", "b")
    before = dict(record.engine)
    await registry.withdraw_all()
    record.engine.clear()  # sleep at level 2
    assert await registry.add_all() == {}
    assert record.engine == before
    assert await registry.publish_all() == {}


@pytest.mark.parametrize("step", ["verify", "remove", "add"])
async def test_one_that_cannot_be_added_again_has_failed_and_the_others_stay(step: str) -> None:
    registry, record = await loaded("a", "b")
    record.fail(step, AdapterRefused("files have changed"))
    assert await registry.add_all() == {"a": "files have changed"}
    failed, other = registry.entries()
    assert (failed.state, failed.error, failed.is_published) == (
        AdapterState.FAILED,
        "files have changed",
        False,
    )
    assert other.state is AdapterState.LOADED and set(record.published) == {"b"}
    assert [adapter.name for adapter in record.engine.values()] == ["b"]


# -- the end ---------------------------------------------------------------------------------------


async def test_close_rolls_back_what_is_going_on() -> None:
    registry, record = make()
    gate = record.hold("add")
    callers = [asyncio.create_task(registry.load("a", "/a")), asyncio.create_task(registry.unload("a"))]
    await gate.reached.wait()
    await registry.close()
    for found in await asyncio.gather(*callers, return_exceptions=True):
        assert isinstance(found, WrongState) and "ending" in str(found)
    assert record.engine == {} and only(registry).error == "the worker is ending"


async def test_nobody_finds_an_adapter_after_the_end() -> None:
    registry, record = await loaded("a")
    await registry.close()
    assert record.published == {}
    with pytest.raises(WrongState):
        await registry.load("b", "/b")


# -- any order of acts -----------------------------------------------------------------------------

NAMES = ("a", "b", "c")
FAULTS = ("fetch", "verify", "add", "remove", "publish", "withdraw")
OPERATIONS = st.one_of(
    st.tuples(st.just("load"), st.sampled_from(NAMES), st.sampled_from(("/1", "/2"))),
    st.tuples(st.just("unload"), st.sampled_from(NAMES)),
    st.tuples(st.just("lease"), st.sampled_from(NAMES)),
    st.tuples(st.just("release")),
    st.tuples(st.just("cancel")),
    st.tuples(st.just("fail"), st.sampled_from(FAULTS)),
    st.tuples(st.just("turns"), st.sampled_from(("1", "3", "9"))),
    st.tuples(st.sampled_from(("withdraw_all", "publish_all", "add_all"))),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPERATIONS, max_size=40))
def test_no_order_of_acts_breaks_the_books(operations: list[tuple[str, ...]]) -> None:
    asyncio.run(play(operations))


async def play(operations: list[tuple[str, ...]]) -> None:  # noqa: C901
    registry, record = make(capacity=2)
    acts: list[asyncio.Task[Any]] = []
    leases: list[Lease] = []
    for what, *args in operations:
        if what == "lease":
            try:
                leases.append(registry.lease(args[0]))
            except UnknownModel:
                continue
        elif what == "release" and leases:
            leases.pop(0).release()
        elif what == "cancel" and acts:
            acts[-1].cancel()
        elif what == "fail":
            record.fail(args[0], RuntimeError(args[0]))
        elif what == "turns":
            for _ in range(int(args[0])):
                await asyncio.sleep(0)
        elif what in ("load", "unload", "withdraw_all", "publish_all", "add_all"):
            acts.append(asyncio.create_task(getattr(registry, what)(*args)))
        check_books(registry, record, leases)
    record.faults.clear()
    for lease in leases:
        lease.release()
    for found in await asyncio.gather(*acts, return_exceptions=True):
        assert not isinstance(found, BaseException) or isinstance(
            found, DynamoVllmError | RuntimeError | asyncio.CancelledError
        ), found
    await passes()
    check_at_rest(registry, record)
    for entry in registry.entries():
        await registry.unload(entry.name)
    assert not record.engine and not record.published and registry.entries() == []


def check_books(registry: Registry, record: Record, leases: list[Lease]) -> None:
    assert len(record.engine) <= registry.capacity
    shown = {adapter.id for adapter in record.published.values()}
    assert shown <= set(record.engine) or record.failed["withdraw"]
    assert {lease.adapter.id for lease in leases} <= set(record.engine)  # nothing in use is removed
    counted = Counter(lease.adapter.name for lease in leases)
    for entry in registry.entries():
        assert entry.leases <= counted[entry.name]


def check_at_rest(registry: Registry, record: Record) -> None:
    entries = registry.entries()
    assert {entry.state for entry in entries} <= {AdapterState.LOADED, AdapterState.FAILED}
    assert all(entry.leases == 0 for entry in entries)
    loaded = {entry.id for entry in entries if entry.state is AdapterState.LOADED}
    kept = {entry.id for entry in entries if entry.state is AdapterState.FAILED}
    assert loaded <= set(record.engine) <= loaded | kept
    shown = {entry.name for entry in entries if entry.is_published}
    assert shown <= set(record.published)
    assert shown == set(record.published) or record.failed["publish"] + record.failed["withdraw"]
