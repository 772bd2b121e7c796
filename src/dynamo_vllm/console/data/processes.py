"""Lists the processes of a deployment: as its `serve` on this machine says, or as far as they answer."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.supervise.control import client
from dynamo_vllm.supervise.keeper import DRAINED, DRAINING
from dynamo_vllm.supervise.process.ended import ON_ORDER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.console.data.frontends import FrontendState
    from dynamo_vllm.observe.status_data import Worker
    from dynamo_vllm.supervise.run_folder import RunFolder

    Process = dict[str, Any]

ASK_SECONDS = 4.0
SHOWN = ("name", "kind", "pid", "state", "since", "phase", "role", "group", "restarts", "last_exit", "log")
HERE = socket.gethostname()


async def of_serve(folder: RunFolder | None) -> list[Process] | None:
    """Return the processes of a `serve`; None if there is none, or it does not answer."""
    control = None if folder is None else folder.control
    if control is None:
        return None
    try:
        found = await client.ask(control, {"verb": "processes"}, answer_seconds=ASK_SECONDS)
    except DynamoVllmError:
        return None
    return [{name: one.get(name) for name in SHOWN} for one in found.get("processes", ())]


def drained(of_serve: Sequence[Process] | None) -> list[str]:
    """Return the names of the processes that an operator stopped until further notice."""
    return [one["name"] for one in of_serve or () if one["phase"] == DRAINED]


def was_stopped(name: str | None, pid: int | None, of_serve: Sequence[Process] | None) -> bool:
    """Return whether the process that had this pid ends or has ended because an operator asked for it."""
    if name is None or of_serve is None:
        return False
    one = next((one for one in of_serve if one["name"] == name), None)
    if one is None:  # `scale` took it away
        return True
    if one["pid"] == pid:
        return bool(one["state"] == DRAINING)
    return (one["last_exit"] or {}).get("reason") == ON_ORDER


def that_answer(
    frontends: Sequence[FrontendState], workers: Sequence[Worker], now: float, began: float
) -> list[Process]:
    """Return the processes that answer, and this one. `began` is when this one did."""
    found = [
        _process(one.name, "frontend", None, "ready" if one.is_ready else "not ready")
        for one in frontends
        if one.problem is None
    ]
    for worker in workers:
        reply = worker.reply
        if reply.get("status") == "success":
            since = round(now - float(reply.get("uptime_seconds") or 0))
            name, state = f"worker {worker.worker}", str(reply.get("state"))
            found.append(_process(name, "worker", reply.get("pid"), state, since))
    return [*found, _process("console", "console", os.getpid(), "ready", round(began))]


def _process(name: str, kind: str, pid: int | None, state: str, since: float | None = None) -> Process:
    none = dict.fromkeys(SHOWN)
    return {**none, "name": name, "kind": kind, "pid": pid, "state": state, "since": since, "restarts": 0}


def of_worker(reply: Mapping[str, Any], processes: Sequence[Process] | None) -> Process | None:
    """Return the process of a worker of this machine."""
    if reply.get("host") != HERE:
        return None
    pid = reply.get("pid")
    return next((one for one in processes or () if pid is not None and one["pid"] == pid), None)
