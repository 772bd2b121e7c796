"""Faults of the servers over which frontend and workers find and reach each other: etcd and NATS."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from faults.deployment import FAKE
from faults.load import Load, long_answers
from faults.scenario import Counts, Fault, Run
from harness.planes import Planes, planes
from harness.stack import Stack, stack
from harness.waiting import until

CLIENTS, TOKENS, TOKEN_MS = 4, 100, 10
WORKERS = 2
LOST_SECONDS = 10.0


@dataclass
class Cluster:
    """A frontend and two workers, with the servers between them."""

    planes: Planes
    stack: Stack

    def is_whole(self) -> bool:
        """The same processes, all known to the frontend."""
        workers = self.stack.workers
        return len(self.stack.instances()) == len(workers) and all(worker.is_ready() for worker in workers)

    def wait_for_heartbeats(self) -> None:
        """Returns when every worker has renewed its lease, as it has where etcd was not away a moment ago."""
        last = self.remaining_seconds()
        missing = set(last)

        def all_renewed() -> bool:
            now = self.remaining_seconds()
            missing.difference_update(lease for lease, left in now.items() if left > last[lease])
            last.update(now)
            return not missing

        until("a heartbeat of each worker", all_renewed, every=0.5)

    def remaining_seconds(self) -> dict[int, int]:
        """Of each worker's lease, whose number is that of the worker."""
        url = f"{self.planes.servers['etcd'].url}/v3/lease/timetolive"
        leases = [int(one["instance_id"]) for one in self.stack.instances()]
        return {lease: int(httpx.post(url, json={"ID": str(lease)}).json()["TTL"]) for lease in leases}


@contextlib.contextmanager
def cluster(named: str, folder: Path, model: Path) -> Iterator[Cluster]:
    words = ("--model", str(model), "--served-model-name", "tiny", "--engine", "fake", "--fake-engine")
    with planes(named, folder) as servers, stack(folder, **servers.env(folder)) as made:
        made.start_frontend()
        for _ in range(WORKERS):
            made.start_worker(*words, json.dumps({**FAKE, "token_ms": TOKEN_MS}))
        made.wait_ready()
        yield Cluster(servers, made)


def over_etcd(folder: Path, model: Path) -> contextlib.AbstractContextManager[Cluster]:
    return cluster("etcd,tcp,zmq", folder, model)


def over_nats(folder: Path, model: Path) -> contextlib.AbstractContextManager[Cluster]:
    return cluster("etcd,nats,nats", folder, model)


NOT_HEARD = {
    "500": "the frontend is back at NATS a moment before its workers, and finds none",
    "503": "the same: for up to 3 s it leaves out workers that it did not find",
}
STARTS = {"etcd": over_etcd, "nats": over_nats}


def away(run: Run, name: str, seconds: float) -> Counts:
    """The server is killed and starts again so many seconds later, with its data."""
    made: Cluster = run.sites.get(STARTS[name])
    server = made.planes.servers[name]
    processes = [worker.process for worker in made.stack.workers]
    if name == "etcd":
        made.wait_for_heartbeats()
    with Load(made.stack.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        load.fault()
        server.kill()
        time.sleep(seconds)  # the fault itself
        server.start()
        load.recovered(made.is_whole)
    assert [process.poll() for process in processes] == [None] * WORKERS, "a worker has ended"
    return load.counts()


SCENARIOS = (
    Fault(
        "etcd-restarted",
        "etcd is killed and starts again, requests over TCP, events over ZMQ: nobody notices",
        partial(away, name="etcd", seconds=0),
    ),
    Fault(
        "etcd-lost",
        "the same, but it is away for 10 s",
        partial(away, name="etcd", seconds=LOST_SECONDS),
    ),
    Fault(
        "nats-restarted",
        "NATS, which carries requests and events, is killed and starts again: answers under way go on",
        partial(away, name="nats", seconds=0),
    ),
    Fault(
        "nats-lost",
        "the same, but it is away for 10 s",
        partial(away, name="nats", seconds=LOST_SECONDS),
        explained=NOT_HEARD,
    ),
)
