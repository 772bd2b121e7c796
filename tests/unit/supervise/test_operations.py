"""Orders to a running supervisor: list, restart, drain, scale; over its socket, with small real processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.errors import StartError
from dynamo_vllm.supervise.control import client, messages, server
from dynamo_vllm.supervise.control.messages import BUSY, FAILED, REFUSED, UNKNOWN, ControlError
from dynamo_vllm.supervise.control.words import drained, scaled
from dynamo_vllm.supervise.planning.process import Group
from harness.kept import DRAINS, FAILS, FRAIL, LIMITS, SLOW, Kept, MoreWorkers, kept, worker
from harness.waiting import until


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes look for their files here."""
    monkeypatch.chdir(tmp_path)


def put(name: str) -> None:
    Path(name).touch()


def is_there(name: str) -> bool:
    return Path(name).exists()


def draining() -> Any:
    return worker("worker-1", DRAINS, drain_seconds=30.0)


GIVES_UP = dataclasses.replace(LIMITS, restarts=0, retry_seconds=3600)


async def refused(found: Kept, kind: str, message: str, verb: str, **more: Any) -> None:
    with pytest.raises(ControlError, match=message) as refusal:
        await found.ask(verb, **more)
    assert refusal.value.kind == kind


# --- processes ------------------------------------------------------------------------------------------


async def test_processes_are_listed_with_their_groups(tmp_path: Path) -> None:
    async with kept(tmp_path) as found:
        about = await found.ask("processes")
        assert stat.S_IMODE(found.control.stat().st_mode) == 0o600, "the socket is the user's own"
        first, second = about["processes"]
        assert (first["name"], first["kind"], first["role"], first["group"]) == (
            "worker-1", "worker", "agg", "worker",
        )  # fmt: skip
        assert (first["pid"], second["pid"]) == (found.pid("worker-1"), found.pid("worker-2"))
        assert (first["state"], first["phase"], first["restarts"]) == ("ready", "ready", 0)
        assert (first["last_exit"], first["log"]) == (None, "worker-1.log")
        assert about["groups"] == [
            {"name": "worker", "model": "m", "role": "agg", "workers": ["worker-1", "worker-2"]},
            {"name": "other", "model": "m", "role": "agg", "workers": []},
        ]
    assert not found.control.exists()


async def test_process_that_waits_for_its_next_start_has_no_pid_and_is_started_by_a_restart(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path, GIVES_UP) as found:
        os.kill(found.pid("worker-1"), signal.SIGKILL)
        await found.tells("giving up on worker-1")
        about = (await found.processes())["worker-1"]
        assert (about["state"], about["pid"]) == ("waiting", None)
        assert (about["last_exit"]["code"], about["last_exit"]["reason"]) == (-9, "was killed by SIGKILL")
        assert (await found.ask("restart", name="worker-1"))["process"]["state"] == "ready"


# --- restart --------------------------------------------------------------------------------------------


async def test_restart_replaces_one_process_and_is_no_failure(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    async with kept(tmp_path, GIVES_UP) as found:
        one, other = found.pid("worker-1"), found.pid("worker-2")
        for times in (1, 2):
            result = await found.ask("restart", told.append, name="worker-1")
            assert result["process"]["restarts"] == times
            assert result["process"]["pid"] == found.pid("worker-1") != one
        assert found.pid("worker-2") == other
        assert "starting it again" not in found.said
        assert "giving up" not in found.said
    phases = ("draining", "starting", "ready")
    assert told == [{"process": "worker-1", "phase": phase} for phase in phases] * 2


async def test_restart_waits_for_running_requests_and_no_other_order_for_it_is_taken(tmp_path: Path) -> None:
    async with kept(tmp_path, first=draining()) as found:
        order = asyncio.create_task(found.ask("restart", name="worker-1"))
        await found.tells("worker-1: draining")
        await refused(found, BUSY, "worker-1 is being restarted; wait", "restart", name="worker-1")
        await found.ask("restart", name="worker-2")  # another one may be
        assert not order.done()
        put("finished")
        result = await order
        assert result["process"]["last_exit"]["code"] == 0
        assert not is_there("cut-short")


@pytest.mark.parametrize("verb", ["restart", "drain"])
async def test_order_with_less_time_cuts_requests_short(tmp_path: Path, verb: str) -> None:
    async with kept(tmp_path, first=draining()) as found:
        await found.prints("ready: ")
        result = await found.ask(verb, name="worker-1", drain_seconds=0)
        assert result["process"]["last_exit"]["code"] == 143
        put("finished")


async def test_orders_that_cannot_be_carried_out_are_refused_with_a_kind_and_the_fix(tmp_path: Path) -> None:
    pool = MoreWorkers()
    pool.groups["nodes"] = Group("nodes", "m", "agg", is_headless=True)
    beside = [worker("frontend", role=None, group=""), worker("worker-3", group="nodes")]
    async with kept(tmp_path, beside=beside, pool=pool) as found:
        await found.prints("ready: ")
        before = await found.processes()
        for verb, name, seconds, kind, message in [
            ("restart", "worker-1", 5, REFUSED, "worker-1 ends 0 s after .*--drain-seconds 5"),
            ("drain", "worker-1", 5, REFUSED, "worker-1 ends 0 s after .*--drain-seconds 5"),
            ("restart", "worker-9", None, UNKNOWN, "'worker-9' is no process .* worker-1, worker-2"),
            ("drain", "worker-9", None, UNKNOWN, "'worker-9' is no process of this serve"),
            ("drain", "frontend", None, REFUSED, "frontend is no worker.* choose one of worker-1, .*, or"),
            ("drain", "worker-3", None, REFUSED, "worker-3 runs engines for a worker on another node"),
        ]:
            await refused(found, kind, message, verb, name=name, drain_seconds=seconds)
        for group, workers, kind, message in [
            ("w", 2, UNKNOWN, "'w' is no group .* choose one of worker, other"),
            ("worker", 5, REFUSED, "there are not enough GPUs"),
        ]:
            await refused(found, kind, message, "scale", group=group, workers=workers)
        same = await found.ask("scale", group="worker", workers=2)
        assert (same["started"], same["stopped"]) == ([], []), "the number that is there"
        assert await found.processes() == before


async def test_workers_are_neither_drained_nor_scaled_while_serve_starts(tmp_path: Path) -> None:
    async with kept(tmp_path, beside=[worker("worker-3", SLOW)]) as found:
        starting = "serve is still starting"
        await refused(found, BUSY, starting, "drain", name="worker-1")
        await refused(found, BUSY, starting, "scale", group="worker", workers=4)
        put("go")
        await found.prints("ready: ")


async def test_process_that_is_starting_is_started_again(tmp_path: Path) -> None:
    async with kept(tmp_path, beside=[worker("worker-3", SLOW)]) as found:
        await found.tells("worker-3: loading")
        order = asyncio.create_task(found.ask("restart", name="worker-3"))
        await found.tells("worker-3: loading", times=2)
        put("go")
        assert (await order)["process"]["restarts"] == 1
        await found.prints("ready: ")


@pytest.mark.parametrize("was_drained", [False, True])
async def test_process_that_does_not_come_back_is_told_and_tried_again(
    tmp_path: Path, was_drained: bool
) -> None:
    limits = dataclasses.replace(LIMITS, restarts=1000)
    async with kept(tmp_path, limits, first=worker("worker-1", FRAIL)) as found:
        await found.prints("ready: ")
        if was_drained:
            await found.ask("drain", name="worker-1")
        put("broken")
        await refused(found, FAILED, "exited with code 1: it is broken", "restart", name="worker-1")
        os.unlink("broken")
        await found.ready("worker-1", times=2)


@pytest.mark.parametrize("verb", ["restart", "drain"])
async def test_end_of_serve_during_an_order_cuts_no_request_short(tmp_path: Path, verb: str) -> None:
    async with kept(tmp_path, first=draining()) as found:
        await found.prints("ready: ")
        order = asyncio.create_task(found.ask(verb, name="worker-1"))
        await found.tells("worker-1: draining")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(ControlError, match="serve is stopping"):
            await order
        await found.tells("stopping: ")
        put("finished")
        await found.ended()
    assert not is_there("cut-short")
    assert "killed" not in found.said


async def test_second_signal_during_a_restart_ends_everything_at_once(tmp_path: Path) -> None:
    async with kept(tmp_path, first=draining(), code=128 + signal.SIGTERM) as found:
        order = asyncio.create_task(found.ask("restart", name="worker-1"))
        await found.tells("worker-1: draining")
        os.kill(os.getpid(), signal.SIGTERM)
        await found.tells("stopping: ")
        os.kill(os.getpid(), signal.SIGTERM)
        await found.ended()
        with pytest.raises(ControlError, match="serve is stopping"):
            await order


# --- drain ----------------------------------------------------------------------------------------------


async def test_drained_worker_stays_stopped_until_it_is_restarted(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    async with kept(tmp_path, first=draining()) as found:
        await found.prints("ready: ")
        order = asyncio.create_task(found.ask("drain", told.append, name="worker-1"))
        await found.tells("worker-1: draining")
        assert not order.done()
        put("finished")
        result = await order
        assert told == [{"process": "worker-1", "phase": phase} for phase in ("draining", "drained")]
        assert (result["model"], result["role"], result["was_last"]) == ("m", "agg", False)
        about = (await found.processes())["worker-1"]
        assert (about["state"], about["phase"], about["pid"]) == ("stopped", "drained", None)
        assert (about["last_exit"]["code"], about["last_exit"]["reason"]) == (0, "was stopped")
        targets = json.loads(found.targets.read_text())
        assert [target["labels"]["process"] for target in targets] == ["worker-2"]
        assert (await found.ask("drain", name="worker-1"))["process"]["phase"] == "drained"  # nothing to do
        again = await found.ask("restart", name="worker-1")
        assert (again["process"]["state"], again["process"]["restarts"]) == ("ready", 1)
        assert "worker-1" in found.targets.read_text()
        assert not is_there("cut-short")
        assert "starting it again" not in found.said


async def test_last_worker_is_drained_and_that_is_told(tmp_path: Path) -> None:
    async with kept(tmp_path) as found:
        await found.prints("ready: ")
        results = [await found.ask("drain", name=name) for name in ("worker-1", "worker-2")]
        assert [result["was_last"] for result in results] == [False, True]
        assert drained(results[1]).splitlines()[1] == (
            "no other agg worker of m is in service: requests for it fail until one is"
        )
        await found.ask("restart", name="worker-1")
        assert (await found.ask("drain", name="worker-2"))["was_last"] is False
        await found.ask("drain", name="worker-1")
    assert found.said.splitlines()[-1].endswith("stopped"), "the end is as always"


async def test_worker_that_is_drained_takes_no_other_order_and_may_be_the_last_then(tmp_path: Path) -> None:
    async with kept(tmp_path, first=draining()) as found:
        await found.prints("ready: ")
        order = asyncio.create_task(found.ask("drain", name="worker-1"))
        await found.tells("worker-1: draining")
        for verb in ("drain", "restart"):
            await refused(found, BUSY, "worker-1 is being drained; wait", verb, name="worker-1")
        assert (await found.ask("drain", name="worker-2"))["was_last"] is True
        put("finished")
        assert (await order)["was_last"] is True


async def test_worker_that_dies_while_it_is_drained_stays_stopped(tmp_path: Path) -> None:
    async with kept(tmp_path, first=draining()) as found:
        await found.prints("ready: ")
        order = asyncio.create_task(found.ask("drain", name="worker-1"))
        await found.tells("worker-1: draining")
        os.kill(found.pid("worker-1"), signal.SIGKILL)
        assert (await order)["process"]["state"] == "stopped"


async def test_worker_that_keeps_failing_can_be_stopped_by_a_drain(tmp_path: Path) -> None:
    async with kept(tmp_path, GIVES_UP) as found:
        await found.prints("ready: ")
        os.kill(found.pid("worker-1"), signal.SIGKILL)
        await found.tells("giving up on worker-1")
        about = (await found.ask("drain", name="worker-1"))["process"]
        assert (about["state"], about["last_exit"]["reason"]) == ("stopped", "was killed by SIGKILL")
        assert (await found.ask("restart", name="worker-1"))["process"]["state"] == "ready"


async def test_last_running_worker_that_keeps_failing_ends_serve(tmp_path: Path) -> None:
    async with kept(tmp_path, GIVES_UP, code=1) as found:
        await found.prints("ready: ")
        await found.ask("drain", name="worker-1")
        os.kill(found.pid("worker-2"), signal.SIGKILL)
        await found.ended()
    assert "giving up after 0 restarts in a row" in found.said


async def test_group_with_a_drained_worker_is_scaled(tmp_path: Path) -> None:
    pool = MoreWorkers()
    async with kept(tmp_path, pool=pool) as found:
        await found.prints("ready: ")
        await found.ask("drain", name="worker-1")
        same = await found.ask("scale", group="worker", workers=2)
        assert (same["started"], same["drained"]) == ([], ["worker-1"])
        assert scaled(same).startswith("worker: 2 workers, of which worker-1 is drained (nothing to do)")
        grown = await found.ask("scale", group="worker", workers=3)  # the drained one stays so
        assert (grown["started"], grown["drained"]) == (["worker-3"], ["worker-1"])
        shrunk = await found.ask("scale", group="worker", workers=2)  # and leaves first
        assert (shrunk["stopped"], shrunk["drained"]) == (["worker-1"], [])
        assert pool.released == ["worker-1"]


# --- scale ----------------------------------------------------------------------------------------------


async def test_group_grows_and_shrinks_newest_first(tmp_path: Path) -> None:
    pool = MoreWorkers()
    async with kept(tmp_path, pool=pool) as found:
        await found.prints("ready: ")
        one = found.pid("worker-1")
        grown = await found.ask("scale", group="worker", workers=4)
        assert grown["workers"] == ["worker-1", "worker-2", "worker-3", "worker-4"]
        assert grown["started"] == ["worker-3", "worker-4"]
        assert "worker-4" in found.targets.read_text()
        shrunk = await found.ask("scale", group="worker", workers=1)
        assert (shrunk["workers"], found.pid("worker-1")) == (["worker-1"], one)
        assert shrunk["stopped"] == ["worker-2", "worker-3", "worker-4"]
        assert sorted(pool.released) == ["worker-2", "worker-3", "worker-4"]
        targets = json.loads(found.targets.read_text())
        assert [target["labels"]["process"] for target in targets] == ["worker-1"]
        assert list(await found.processes()) == ["worker-1"]
        again = await found.ask("scale", group="worker", workers=2)
        assert again["started"] == ["worker-2"]


async def test_worker_that_cannot_start_is_dropped(tmp_path: Path) -> None:
    pool = MoreWorkers(FAILS)
    async with kept(tmp_path, pool=pool) as found:
        await found.prints("ready: ")
        with pytest.raises(ControlError, match="no such thing(.|\n)*worker has 2 workers now") as failure:
            await found.ask("scale", group="worker", workers=3)
        assert failure.value.kind == FAILED
        assert (list(await found.processes()), pool.released) == (["worker-1", "worker-2"], ["worker-3"])


async def test_last_workers_of_a_model_stay_and_drained_ones_do_not_count(tmp_path: Path) -> None:
    async with kept(tmp_path) as found:
        await found.prints("ready: ")
        only = "has the only agg workers of m; keep at least 1"
        await found.ask("scale", group="other", workers=1)
        (name,) = (await found.ask("processes"))["groups"][1]["workers"]
        await found.ask("drain", name=name)
        await refused(found, REFUSED, f"worker {only}", "scale", group="worker", workers=0)
        await found.ask("restart", name=name)
        assert (await found.ask("scale", group="worker", workers=0))["workers"] == []
        await refused(found, REFUSED, f"other {only}", "scale", group="other", workers=0)


async def test_group_is_scaled_by_one_at_a_time(tmp_path: Path) -> None:
    async with kept(tmp_path, pool=MoreWorkers(SLOW)) as found:
        await found.prints("ready: ")
        order = asyncio.create_task(found.ask("scale", group="worker", workers=3))
        await found.tells("worker-3: loading")
        with pytest.raises(ControlError, match="worker is being scaled; wait"):
            await found.ask("scale", group="worker", workers=2)
        with pytest.raises(ControlError, match="worker-3 is being started; wait"):
            await found.ask("restart", name="worker-3")
        put("go")
        assert (await order)["started"] == ["worker-3"]


async def test_worker_that_is_restarted_is_not_taken_away_meanwhile(tmp_path: Path) -> None:
    async with kept(tmp_path, pool=MoreWorkers(DRAINS, drain_seconds=30.0)) as found:
        await found.prints("ready: ")
        await found.ask("scale", group="worker", workers=3)
        order = asyncio.create_task(found.ask("restart", name="worker-3"))
        await found.tells("worker-3: draining")
        with pytest.raises(ControlError, match="worker-3 is being restarted"):
            await found.ask("scale", group="worker", workers=1)
        put("finished")
        await order
        assert (await found.ask("scale", group="worker", workers=1))["workers"] == ["worker-1"]


async def test_end_of_serve_while_a_group_grows_leaves_nothing(tmp_path: Path) -> None:
    async with kept(tmp_path, pool=MoreWorkers(SLOW)) as found:
        await found.prints("ready: ")
        order = asyncio.create_task(found.ask("scale", group="worker", workers=4))
        await found.tells("worker-4: loading")
        pids = [about["pid"] for about in (await found.processes()).values()]
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(ControlError, match="serve is stopping"):
            await order
        await found.ended()
    assert not [pid for pid in pids if is_there(f"/proc/{pid}")]


# --- the socket -----------------------------------------------------------------------------------------


async def test_client_that_has_gone_does_not_stop_what_it_asked_for(tmp_path: Path) -> None:
    async with kept(tmp_path, first=draining()) as found:
        _, writer = await asyncio.open_unix_connection(found.control)
        writer.write(b'{"verb": "restart", "name": "worker-1"}\n')
        await found.tells("worker-1: draining")
        writer.transport.abort()
        put("finished")
        await found.ready("worker-1", times=2)
        assert (await found.processes())["worker-1"]["restarts"] == 1


@contextlib.asynccontextmanager
async def listening(control: Path, answer: server.Perform) -> AsyncIterator[None]:
    task = asyncio.create_task(server.listen(control, answer))
    await asyncio.to_thread(until, "the socket", control.exists)
    yield
    task.cancel()
    await asyncio.wait([task])


async def test_line_that_is_no_request_is_refused(tmp_path: Path) -> None:
    async def never(*_: object) -> dict[str, Any]:
        raise AssertionError("nothing is done")

    async with listening(tmp_path / "control", never):
        for line in (
            b"\n",
            b"{\n",
            b"[]\n",
            b'"restart"\n',
            b"\xff\xfe\n",
            b'{"verb": "destroy"}\n',
            b'{"name": "worker-1"}\n',
            b'{"verb": "restart"}\n',
            b'{"verb": "restart", "name": 7}\n',
            b'{"verb": "restart", "name": "worker-1", "drain_seconds": -1}\n',
            b'{"verb": "restart", "name": "worker-1", "force": true}\n',
            b'{"verb": "scale", "group": "worker", "workers": -1}\n',
            b'{"verb": "scale", "group": "worker", "workers": 1000}\n',
            b'{"verb": "scale", "group": "worker", "workers": "2"}\n',
            b'{"verb": "processes"}',
            b"x" * (messages.MAX_LINE_BYTES + 1) + b"\n",
        ):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "control")
            writer.write(line)
            writer.write_eof()
            told = json.loads(await reader.readline())
            assert told["error"]["kind"] == messages.BAD_REQUEST, line[:80]
            assert await reader.read() == b""
            writer.close()


async def test_mistake_of_ours_is_told_and_the_next_request_answered(tmp_path: Path) -> None:
    async def fail_once(*_: object) -> dict[str, Any]:
        if not answers:
            answers.append(1)
            raise RuntimeError("nobody thought of this")
        return {"fine": True}

    answers: list[int] = []
    async with listening(tmp_path / "control", fail_once):
        with pytest.raises(ControlError, match="RuntimeError: nobody thought of this"):
            await client.ask(tmp_path / "control", {"verb": "processes"})
        assert await client.ask(tmp_path / "control", {"verb": "processes"}) == {"fine": True}


async def test_serve_runs_without_a_socket_that_cannot_be(tmp_path: Path) -> None:
    async with kept(tmp_path, control=tmp_path / ("x" * 120)) as found:
        await found.tells("cannot be opened")
        await found.prints("ready: ")
        with pytest.raises(StartError, match="serve does not answer on"):
            await found.ask("processes")
