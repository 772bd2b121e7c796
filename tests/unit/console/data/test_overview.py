"""One picture of a deployment, from what frontends and workers say."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm.console.data import models, overview, problems, processes
from dynamo_vllm.console.data.frontends import FrontendState
from dynamo_vllm.console.data.history import History
from dynamo_vllm.console.data.overview import Poller
from dynamo_vllm.console.live import Hub
from dynamo_vllm.observe.frontend_figures import FrontendFigures
from dynamo_vllm.observe.status_data import Worker
from dynamo_vllm.serving.admin.client import failure
from dynamo_vllm.serving.calls.card import WorkerCard

ONE, TWO = 0xA1B2C3D4E5F60718, 0x1122334455667788
RANK = {"rank": 0, "running": 1, "waiting": 2, "kv_usage": 0.25, "hit_rate": 0.5, "tokens_per_second": 7.0}
TIER = {"tier": "host", "bytes": 10, "used_bytes": 5, "hit_tokens": 1, "read_bytes": 2, "written_bytes": 3}


def status(**more: Any) -> dict[str, Any]:
    return {
        **{"status": "success", "role": "agg", "state": "ready", "models": ["tiny"], "adapters": []},
        **{"ranks": [RANK], "tiers": [TIER], "host": "h", "pid": 1, "in_flight": 3, "requests": 0},
        **{"uptime_seconds": 5.0, "last_error": None, "versions": {"vllm": "1"}},
        **more,
    }


class FakeFrontends:
    def __init__(self) -> None:
        self.state = FrontendState("frontend", "http://f", ("tiny",), FrontendFigures(requests=4.0))
        self.listed = 0

    async def ask(self) -> list[FrontendState]:
        return [self.state]

    async def models(self) -> list[dict[str, Any]]:
        self.listed += 1
        return [{"id": "tiny", "context_window": 4096}, {"id": "sql"}]


class FakeWorkers:
    def __init__(self) -> None:
        self.replies: dict[int, dict[str, Any]] = {}

    @property
    def found(self) -> list[int]:
        return list(self.replies)

    async def ask_all(self, verb: str, seconds: float | None = None) -> dict[int, dict[str, Any]]:
        assert verb == "status"
        return self.replies


class FakeDirectory:
    async def every(self, names: Any = ()) -> list[WorkerCard]:
        return [WorkerCard(models=("tiny", "sql"), apis=("chat", "completions"), max_model_len=4096)]


class Polled:
    """A poller and what it asks."""

    def __init__(self) -> None:
        self.frontends, self.workers, self.hub = FakeFrontends(), FakeWorkers(), Hub()
        asked: tuple[Any, Any, Any] = (self.frontends, self.workers, FakeDirectory())
        self.poller = Poller(*asked, History(), self.hub, "no worker is in discovery")

    async def look(self, replies: dict[int, dict[str, Any]]) -> dict[str, Any]:
        self.workers.replies = replies
        await self.poller.poll()
        return self.poller.overview


async def test_worker_is_shown_as_it_says() -> None:
    error = {"message": "boom", "seconds_ago": 3.0}
    found = await Polled().look({ONE: status(last_error=error)})
    (worker,) = found["workers"]
    assert (worker["id"], worker["instance"], worker["role"]) == ("a1b2c3", str(ONE), "agg")
    assert (worker["kv_used"], worker["hit_rate"], worker["running"], worker["waiting"]) == (0.25, 0.5, 1, 2)
    assert worker["tiers"][0]["size_bytes"] == 10 and "bytes" not in worker["tiers"][0]
    assert worker["last_error"]["message"] == "boom"
    assert [one["what"] for one in found["problems"]] == ["a request failed on worker a1b2c3"]
    assert found["frontends"][0] == {
        **{"name": "frontend", "url": "http://f", "ready": True},
        **{"in_flight": 0.0, "requests_total": 4.0, "errors_total": 0.0},
    }


async def test_requests_of_a_worker_are_counted_from_the_second_poll_on() -> None:
    polled = Polled()
    first = await polled.look({ONE: status(requests=5)})
    assert first["edges"][0]["requests_per_second"] is None
    second = await polled.look({ONE: status(requests=9)})
    assert second["workers"][0]["requests_per_second"] > 0
    assert second["edges"][0]["from"] == "frontend" and second["edges"][0]["to"] == "a1b2c3"


async def test_worker_that_misses_two_polls_has_the_same_fields_and_is_a_problem() -> None:
    polled = Polled()
    silent = {ONE: failure("unreachable", "cannot be reached", 503)}
    whole = await polled.look({ONE: status()})
    found = await polled.look(silent)
    assert (found["workers"][0]["state"], found["problems"]) == ("ready", [])
    found = await polled.look(silent)
    assert set(found["workers"][0]) == set(whole["workers"][0])
    assert found["workers"][0]["state"] == "no answer"
    assert (found["problems"][0]["worker"], found["problems"][0]["severity"]) == ("a1b2c3", "error")


async def test_silence_is_counted_from_the_last_answer() -> None:
    polled = Polled()
    silent, whole = {ONE: failure("no_answer", "did not answer", 504)}, {ONE: status()}
    assert (await polled.look(silent))["workers"][0]["state"] == "no answer"  # it never answered
    for replies in (whole, silent, whole, silent):
        assert (await polled.look(replies))["workers"][0]["state"] == "ready"
    assert (await polled.look(silent))["workers"][0]["state"] == "no answer"
    assert (await polled.look(silent))["workers"][0]["state"] == "no answer"


async def test_frontend_that_misses_two_polls_is_a_problem() -> None:
    polled = Polled()
    idle: list[float] = []
    polled.poller.on_idle = idle.append
    await polled.look({ONE: status()})
    polled.frontends.state = FrontendState("frontend", "http://f", problem="it did not answer within 4 s")
    first = await polled.look({ONE: status()})
    assert (first["frontends"][0]["ready"], first["problems"]) == (True, [])
    assert len(idle) == 1, "who is silent is not known to be idle"
    second = await polled.look({ONE: status()})
    assert [one["what"] for one in second["problems"]] == ["frontend does not answer"]


async def test_reason_why_requests_are_not_explained_is_a_problem() -> None:
    polled = Polled()
    reasons = ["no worker publishes KV events; start workers with --kv-events", "it is so"]
    polled.poller.unexplained = lambda: reasons
    found = (await polled.look({ONE: status()}))["problems"]
    assert [(one["why"], one["fix"], one["severity"]) for one in found] == [
        ("no worker publishes KV events", "start workers with --kv-events", "warning"),
        ("it is so", None, "warning"),
    ]
    assert (await polled.look({ONE: status(role="pooling")}))["problems"] == []
    reasons.clear()
    assert (await polled.look({ONE: status()}))["problems"] == []


async def test_worker_that_vanishes_is_a_problem_until_it_is_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    polled = Polled()
    await polled.look({ONE: status(), TWO: status()})
    found = await polled.look({TWO: status()})
    assert [one["what"] for one in found["problems"]] == ["worker a1b2c3 is gone"]
    assert polled.poller.name_of(ONE) == "a1b2c3"
    monkeypatch.setattr(overview, "GONE_SECONDS", -1.0)
    assert (await polled.look({TWO: status()}))["problems"] == []
    monkeypatch.undo()
    await polled.look({TWO: status(state="draining")})
    drained = await polled.look({ONE: status()})
    assert drained["problems"] == [], "one that drained may go"


def process(name: str, state: str = "ready", **more: Any) -> dict[str, Any]:
    return {**dict.fromkeys(processes.SHOWN), "name": name, "state": state, "phase": state, **more}


STOPPED = {"last_exit": {"code": 0, "reason": "was stopped", "at": 1.0}}


@pytest.mark.parametrize(
    "after",
    [
        [process("worker-1", "draining", pid=7)],
        [process("worker-1", "stopped", **STOPPED)],
        [process("worker-1", "starting", **STOPPED)],
        [],
    ],
    ids=["draining", "drained", "restarted", "scaled"],
)
async def test_worker_that_an_operator_stopped_between_two_polls_may_go(
    after: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [process("worker-1", pid=7), process("worker-2", pid=8)]

    async def of_serve(_: object) -> list[dict[str, Any]]:
        return listed

    monkeypatch.setattr(processes, "of_serve", of_serve)
    polled, two = Polled(), status(pid=8, host=processes.HERE)
    await polled.look({ONE: status(pid=7, host=processes.HERE), TWO: two})
    listed[0] |= STOPPED  # an earlier one, which says nothing of this one
    assert [one["what"] for one in (await polled.look({TWO: two}))["problems"]] == ["worker a1b2c3 is gone"]
    listed[:1] = after
    assert (await polled.look({TWO: two}))["problems"] == []


def test_nobody_is_there_because_an_operator_drained_them() -> None:
    nobody = FrontendState("frontend", "u")
    found = [*problems.of_frontends([nobody], ["worker-1"]), *problems.of_workers([], "none", ["worker-1"])]
    assert [(one["what"], one["why"], one["severity"]) for one in found] == [
        ("frontend has no model that can answer", "an operator drained worker-1", "warning"),
        ("there are no workers", "an operator drained worker-1", "warning"),
    ]
    assert {one["fix"] for one in found} == {"start it again: restart worker-1"}


async def test_nobody_to_ask_is_a_problem_with_its_reason() -> None:
    (only,) = (await Polled().look({}))["problems"]
    assert (only["what"], only["why"]) == ("there are no workers", "no worker is in discovery")


async def test_models_are_asked_for_only_when_they_change() -> None:
    polled = Polled()
    for _ in range(3):
        await polled.look({ONE: status(adapters=[{"name": "sql", "state": "loaded", "leases": 0}])})
    assert polled.frontends.listed == 1
    assert polled.poller.models == [
        {"name": "tiny", "kind": "chat", "adapter_of": None, "context": 4096},
        {"name": "sql", "kind": "chat", "adapter_of": "tiny", "context": 4096},
    ]
    polled.frontends.state = FrontendState("frontend", "http://f", ("tiny", "sql"))
    await polled.look({ONE: status()})
    assert polled.frontends.listed == 2


async def test_page_is_sent_what_changed_and_no_clocks() -> None:
    polled = Polled()
    stream: Any = polled.hub.response().body_iterator
    await anext(stream)
    await polled.look({ONE: status()})
    first = await anext(stream)
    assert b"event: overview" in first and b"event: sample" in first
    await polled.look({ONE: status(uptime_seconds=9.0)})
    assert b"event: overview" in await anext(stream)  # the rate of requests is known now
    await polled.look({ONE: status(uptime_seconds=12.0)})
    assert b"event: overview" not in await anext(stream)
    await polled.look({ONE: status(state="paused")})
    assert b"event: overview" in await anext(stream)


def test_costly_polls_come_less_often() -> None:
    assert [overview.pause(cpu, True) for cpu in (0.0, 0.06, 9.0)] == pytest.approx([2.0, 10.0, 60.0])
    assert [overview.pause(cpu, False) for cpu in (0.0, 0.03)] == pytest.approx([5.0, 5.0])


def shown(name: str, role: str, model: str = "tiny") -> dict[str, Any]:
    speeds = {"requests_per_second": 4.0, "tokens_per_second": 8.0, "prompt_tokens_per_second": 600.0}
    return {"id": name, "role": role, "models": [model], **speeds}


def test_prefill_workers_get_and_give_tokens_of_prompts() -> None:
    workers = [shown("p", "prefill"), shown("d1", "decode"), shown("d2", "decode"), shown("e", "encode")]
    found = overview.edges([FrontendState("frontend", "u")], workers)
    assert {(one["from"], one["to"]): one["tokens_per_second"] for one in found} == {
        ("frontend", "p"): 600.0, ("frontend", "d1"): 8.0, ("frontend", "d2"): 8.0,
        ("p", "d1"): 300.0, ("p", "d2"): 300.0, ("e", "p"): None,
    }  # fmt: skip


def test_several_frontends_share_what_a_worker_gets() -> None:
    both = [FrontendState("frontend", "u"), FrontendState("frontend-2", "v")]
    found = overview.edges(both, [shown("a", "agg")])
    shares = [(edge["from"], edge["requests_per_second"]) for edge in found]
    assert shares == [("frontend", 2.0), ("frontend-2", 2.0)]


def test_each_taker_has_its_share_of_what_a_giver_sends() -> None:
    """Workers of other models and roles take no part."""
    prefill, decode = [shown(f"p{n}", "prefill") for n in (1, 2)], [shown(f"d{n}", "decode") for n in (1, 2)]
    others = [shown("x", "decode", "other"), shown("a", "agg", "other"), shown("e", "encode")]
    found = overview.edges([], [*prefill, *decode, *others])
    shares = {(one["kind"], one["to"]): one["requests_per_second"] for one in found if one["from"] in "p1 e"}
    assert shares == {
        ("kv", "d1"): 2.0, ("kv", "d2"): 2.0, ("encoded", "p1"): 2.0, ("encoded", "p2"): 2.0
    }  # fmt: skip


def test_adapters_stand_after_their_base() -> None:
    listed = [{"id": name} for name in ("b-adapter", "a-adapter", "zoo", "base")]
    loaded = status(models=["base"], adapters=[{"name": "b-adapter"}, {"name": "a-adapter"}])
    found = models.described(listed, [], [Worker(1, "a1", 1, loaded)])
    assert [one["name"] for one in found] == ["base", "a-adapter", "b-adapter", "zoo"]


def said(**more: Any) -> list[str]:
    found = problems.of_workers([Worker(1, "a1", 1, status(**more))], None)
    assert all(set(one) == {"what", "why", "fix", "worker", "severity"} for one in found)
    return [one["what"] for one in found]


def test_each_problem_of_a_worker_has_its_words() -> None:
    assert said() == []
    assert said(state="unwell") == ["worker a1 is unwell"]
    assert said(state="asleep") == ["worker a1 is asleep"]
    assert said(adapters=[{"name": "sql", "state": "failed"}]) == ["adapter sql failed on worker a1"]
    assert said(ranks=[{**RANK, "kv_usage": 0.99}]) == ["worker a1 is full"]
    assert said(last_error={"message": "old", "seconds_ago": 9999.0}) == []
    assert said(tiers=[TIER]) == []
    assert said(tiers=[{**TIER, "is_paused": True}]) == ["the disk with KV caches of worker a1 is paused"]


def test_frontend_is_a_problem_if_it_is_silent_or_has_no_model() -> None:
    states = [FrontendState("frontend", "u", problem="refused"), FrontendState("frontend-2", "v")]
    words = [problem["what"] for problem in problems.of_frontends(states)]
    assert words == ["frontend does not answer", "frontend-2 has no model that can answer"]


def test_different_versions_are_a_problem() -> None:
    both = [Worker(1, "a", 1, status()), Worker(2, "b", 2, status(versions={"vllm": "2"}))]
    (only,) = problems.of_workers(both, None)
    assert "1 with vllm 1" in only["why"]


def test_what_a_model_is_for() -> None:
    for apis, kind in {
        ("chat", "completions"): "chat",
        ("completions",): "completions",
        ("embeddings", "rerank"): "embeddings",
        ("rerank", "score"): "rerank",
        ("images",): "image",
        (): "chat",
    }.items():
        (only,) = models.described([{"id": "m"}], [WorkerCard(models=("m",), apis=apis)], [])
        assert only["kind"] == kind, apis


def test_model_that_only_workers_know_is_listed() -> None:
    card = WorkerCard(models=("ear",), apis=("transcriptions",), kind="transcription", max_model_len=100)
    assert models.described([], [card], []) == [
        {"name": "ear", "kind": "transcription", "adapter_of": None, "context": 100}
    ]
