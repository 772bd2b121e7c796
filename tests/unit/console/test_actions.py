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
from harness.refusals import refused

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
    outcome = {"ok": True, "said": "paused", "reply": operated.workers.reply}
    assert found["results"] == [{"worker": name, **outcome} for name in ("a1b2c3", "112233")]
    body = {"mode": "wait"}
    assert [one[:3] for one in operated.workers.asked] == [(ONE, "pause", body), (TWO, "pause", body)]
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


async def test_what_cannot_be_done_is_refused() -> None:
    operated = Operated()
    for verb in ("status", "list_loras", "restart", "../pause"):
        with refused(404):
            await operated.actions.perform(verb, Asked())
    with refused(404):
        await operated.actions.perform("pause", Asked(worker="zz"))
    with refused(400):
        adapter = {"lora_name": "a", "source": {"uri": "adapters/a"}}
        await operated.actions.perform("load_lora", Asked(body=adapter))
    for seconds in ("5", float("nan")):
        with refused(400):
            await operated.actions.perform("sleep", Asked(body={"drain_seconds": seconds}))
    assert operated.workers.asked == [] and operated.done == []
    operated.workers.found = []
    with refused(409, "there are no workers"):
        await operated.actions.perform("pause", Asked())


async def test_read_only_offers_and_does_nothing() -> None:
    operated = Operated(read_only=True)
    assert operated.actions.names == []
    with refused(403):
        await operated.actions.perform("pause", Asked())
    assert operated.workers.asked == []


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


async def order(serve: Serve, verb: str, **fields: Any) -> tuple[str, bool, str]:
    """Give `serve` an order; return which process, whether it did it, and its words."""
    operated = Operated(folder=serve.folder)
    assert {"restart", "drain", "scale"} <= set(operated.actions.names)
    (result,) = (await operated.actions.perform(verb, Asked(**fields)))["results"]
    return result["worker"], result["ok"], result["said"]


async def test_serve_restarts_drains_and_scales_and_its_refusal_is_a_result(serve: Serve) -> None:
    body = {"drain_seconds": 2}
    restarted = await order(serve, "restart", worker="a1", body=body)
    assert restarted == ("process of a1", True, "ready after 1.0 s, pid 7")
    process, is_done, words = await order(serve, "drain", worker="a1", body=body)
    assert (process, is_done) == ("process of a1", True)
    assert words.startswith("drained and stopped after 1.0 s")
    scaled = await order(serve, "scale", group="decode", body={"workers": 3})
    assert scaled == ("decode", False, "there is no room")
    assert serve.asked == [Restart("process of a1", 2.0), Drain("process of a1", 2.0), Scale("decode", 3)]


async def test_orders_that_name_nothing_are_refused(serve: Serve) -> None:
    for verb, fields in (
        ("restart", {}),
        ("restart", {"worker": "console"}),
        ("drain", {}),
        ("scale", {"body": {"workers": 3}}),
        ("scale", {"group": "g", "body": {"workers": "3"}}),
        ("restart", {"worker": "a1", "body": {"drain_seconds": "soon"}}),
    ):
        with pytest.raises(ConsoleError):
            await order(serve, verb, **fields)
    assert serve.asked == []


async def test_serve_that_does_not_answer_is_a_result(tmp_path: Path) -> None:
    _, is_done, words = await order(Serve(tmp_path / "r"), "restart", worker="a1")
    assert not is_done and "does not answer" in words
