"""What an operator can do on the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.admin.verbs import VERBS
from dynamo_vllm.console import actions
from dynamo_vllm.console.actions import Actions, Asked
from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.serving.admin.client import SECONDS, failure
from dynamo_vllm.supervise.control import server
from dynamo_vllm.supervise.control.messages import ControlError, Drain, Report, Request, Restart, Scale
from dynamo_vllm.supervise.run_folder import RunFolder

ONE, TWO = 0xA1B2C3D4E5F60718, 0x1122334455667788


class FakeWorkers:
    def __init__(self) -> None:
        self.found = [ONE, TWO]
        self.asked: list[tuple[int, str, Any, float | None]] = []
        self.reply: dict[str, Any] = {"status": "success", "already": False}

    async def ask(
        self, instance: int, verb: str, body: Mapping[str, Any] | None = None, seconds: float | None = None
    ) -> dict[str, Any]:
        self.asked.append((instance, verb, body, seconds))
        return self.reply


class Operated:
    def __init__(self, *, read_only: bool = False, folder: RunFolder | None = None) -> None:
        self.workers = FakeWorkers()
        self.done: list[dict[str, Any]] = []
        self.actions = Actions(
            self.workers,
            folder,
            None,
            process_of=lambda word: word if word == "console" else f"process of {word}",
            read_only=read_only,
            on_done=self.done.append,
        )


def test_every_verb_is_one_of_the_workers() -> None:
    assert set(actions.OF_WORKERS) <= set(VERBS)


async def test_all_workers_are_asked_and_what_they_did_is_said() -> None:
    operated = Operated()
    found = await operated.actions.perform("pause", Asked(body={"mode": "wait"}))
    assert found["results"] == [
        {"worker": name, "ok": True, "said": "paused", "reply": operated.workers.reply}
        for name in ("a1b2c3", "112233")
    ]
    assert [one[:3] for one in operated.workers.asked] == [
        (ONE, "pause", {"mode": "wait"}),
        (TWO, "pause", {"mode": "wait"}),
    ]
    (event,) = operated.done
    assert event["verb"] == "pause" and "reply" not in event["results"][0]


async def test_one_worker_is_named_by_its_id() -> None:
    operated = Operated()
    await operated.actions.perform("sleep", Asked(worker="1122", body={"drain_seconds": 5}))
    assert operated.workers.asked == [(TWO, "sleep", {"drain_seconds": 5}, SECONDS["sleep"] + 5)]


async def test_refusal_of_a_worker_is_a_result() -> None:
    operated = Operated()
    operated.workers.reply = failure("wrong_state", "it is asleep", 409)
    (one, _) = (await operated.actions.perform("pause", Asked()))["results"]
    assert (one["ok"], one["said"]) == (False, "refused (409 wrong_state): it is asleep")


@pytest.mark.parametrize(
    ("verb", "asked", "status"),
    [
        ("status", Asked(), 404),
        ("list_loras", Asked(), 404),
        ("restart", Asked(), 404),
        ("../pause", Asked(), 404),
        ("pause", Asked(worker="zz"), 404),
        ("load_lora", Asked(body={"lora_name": "a", "source": {"uri": "adapters/a"}}), 400),
        ("sleep", Asked(body={"drain_seconds": "5"}), 400),
        ("sleep", Asked(body={"drain_seconds": float("nan")}), 400),
    ],
)
async def test_what_cannot_be_done_is_refused(verb: str, asked: Asked, status: int) -> None:
    operated = Operated()
    with pytest.raises(ConsoleError) as refused:
        await operated.actions.perform(verb, asked)
    assert refused.value.status == status
    assert operated.workers.asked == [] and operated.done == []


async def test_without_workers_there_is_nobody_to_ask() -> None:
    operated = Operated()
    operated.workers.found = []
    with pytest.raises(ConsoleError, match="there are no workers"):
        await operated.actions.perform("pause", Asked())


async def test_read_only_offers_and_does_nothing() -> None:
    operated = Operated(read_only=True)
    assert operated.actions.names == []
    with pytest.raises(ConsoleError) as refused:
        await operated.actions.perform("pause", Asked())
    assert refused.value.status == 403 and operated.workers.asked == []


class Serve:
    """The control socket of a serve."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.path = folder / "control"
        self.asked: list[Request] = []
        folder.mkdir(exist_ok=True)
        self.folder.note("http://d", control=self.path)

    async def perform(self, request: Request, report: Report) -> dict[str, Any]:
        self.asked.append(request)
        if isinstance(request, Restart):
            return {"process": {"name": request.name, "pid": 7}, "seconds": 1.0}
        if isinstance(request, Drain):
            about = {"model": "m", "role": "agg", "was_last": False}
            return {"process": {"name": request.name}, "seconds": 1.0, **about}
        raise ControlError("refused", "there is no room")


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    made = Serve(tmp_path / "r")
    listening = asyncio.create_task(server.listen(made.path, made.perform))
    while not made.path.exists():
        await asyncio.sleep(0)
    yield made
    listening.cancel()
    await asyncio.wait([listening])


async def test_serve_restarts_the_process_of_a_worker(serve: Serve) -> None:
    operated = Operated(folder=serve.folder)
    assert {"restart", "drain", "scale"} <= set(operated.actions.names)
    found = await operated.actions.perform("restart", Asked(worker="a1", body={"drain_seconds": 2}))
    (one,) = found["results"]
    assert (one["worker"], one["ok"]) == ("process of a1", True)
    assert one["said"] == "ready after 1.0 s, pid 7"
    assert serve.asked == [Restart("process of a1", 2.0)]


async def test_serve_drains_the_process_of_a_worker(serve: Serve) -> None:
    operated = Operated(folder=serve.folder)
    (one,) = (await operated.actions.perform("drain", Asked(worker="a1", body={"drain_seconds": 2})))[
        "results"
    ]
    assert (one["worker"], one["ok"]) == ("process of a1", True)
    assert one["said"].startswith("drained and stopped after 1.0 s")
    assert serve.asked == [Drain("process of a1", 2.0)]


async def test_refusal_of_serve_is_a_result(serve: Serve) -> None:
    asked = Asked(group="decode", body={"workers": 3})
    (one,) = (await Operated(folder=serve.folder).actions.perform("scale", asked))["results"]
    assert (one["worker"], one["ok"], one["said"]) == ("decode", False, "there is no room")
    assert serve.asked == [Scale("decode", 3)]


@pytest.mark.parametrize(
    ("verb", "asked"),
    [
        ("restart", Asked()),
        ("restart", Asked(worker="console")),
        ("drain", Asked()),
        ("scale", Asked(body={"workers": 3})),
        ("scale", Asked(group="g", body={"workers": "3"})),
        ("restart", Asked(worker="a1", body={"drain_seconds": "soon"})),
    ],
)
async def test_orders_that_name_nothing_are_refused(serve: Serve, verb: str, asked: Asked) -> None:
    with pytest.raises(ConsoleError):
        await Operated(folder=serve.folder).actions.perform(verb, asked)
    assert serve.asked == []


async def test_serve_that_does_not_answer_is_a_result(tmp_path: Path) -> None:
    made = Serve(tmp_path / "r")
    (one,) = (await Operated(folder=made.folder).actions.perform("restart", Asked(worker="a1")))["results"]
    assert one["ok"] is False and "does not answer" in one["said"]
