"""Faults of hosts and their links: frontend, etcd and two workers on machines of their own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from faults.deployment import FAKE
from faults.failures.workers import IN_FLIGHT
from faults.load import Load, long_answers
from faults.scenario import Counts, Fault, Run, needs_hosts
from harness.hosts import Host, Hosts, hosts
from harness.servers import etcd
from harness.stack import Stack, Worker, stack
from harness.waiting import until

CLIENTS, TOKENS, TOKEN_MS = 4, 100, 10
CUT_SECONDS = 10.0
REQUESTS = "dynamo_component_requests_total"
SPARE = "d"


@dataclass
class Site:
    """Frontend and etcd on host a; workers on two of the hosts b, c and d."""

    places: Hosts
    stack: Stack
    model: Path
    at: dict[str, Worker] = field(default_factory=dict)

    def start_worker(self, place: str) -> None:
        described = json.dumps({**FAKE, "token_ms": TOKEN_MS})
        names = ("--model", str(self.model), "--served-model-name", "tiny")
        words = (*names, "--engine", "fake", "--fake-engine", described)
        self.at[place] = self.stack.start_worker(*words, host=self.places[place])

    def is_whole(self) -> bool:
        """The frontend knows the workers that there should be, and no others."""
        known = {one["transport"]["tcp"].partition(":")[0] for one in self.stack.instances()}
        return known == {self.places[place].address for place in self.at} and all(
            worker.is_ready() for worker in self.at.values()
        )

    def busy(self) -> str:
        """A place whose worker answers somebody at this moment."""
        return until(
            "a busy worker", lambda: [place for place, worker in self.at.items() if worker.metric(IN_FLIGHT)]
        )[0]


@contextlib.contextmanager
def four_hosts(folder: Path, model: Path) -> Iterator[Site]:
    with hosts("a", "b", "c", SPARE) as places:
        first = places["a"]
        with (
            etcd(folder, host=first.address, prefix=first.prefix) as store,
            stack(folder, DYN_DISCOVERY_BACKEND="etcd", ETCD_ENDPOINTS=store.url) as made,
        ):
            made.start_frontend("--host", "0.0.0.0", host=first)
            site = Site(places, made, model)
            for place in "bc":
                site.start_worker(place)
            made.wait_ready()
            yield site


def link_cut(run: Run, cut: Callable[[Host], None]) -> Counts:
    """The worker goes on running, and must answer again when the link is back."""
    site: Site = run.sites.get(four_hosts)
    with Load(site.stack.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        place = site.busy()
        worker, host = site.at[place], site.places[place]
        load.fault()
        cut(host)
        try:
            time.sleep(CUT_SECONDS)  # the fault itself
        finally:
            host.restore()
        until("its figures", worker.is_ready)
        before = worker.metric(REQUESTS)
        load.recovered(lambda: site.is_whole() and worker.metric(REQUESTS) > before)
        assert worker.process.poll() is None, "the worker has ended"
    return load.counts()


def host_lost(run: Run) -> Counts:
    """Another host takes over; that which was lost comes back empty, for the next run."""
    site: Site = run.sites.get(four_hosts)
    with Load(site.stack.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        place = site.busy()
        (spare,) = {"b", "c", SPARE} - set(site.at)
        load.fault()
        site.places[place].lose()
        del site.at[place]
        site.start_worker(spare)
        load.recovered(site.is_whole)
    site.places[place].restore()
    return load.counts()


SCENARIOS = (
    Fault(
        "link-cut",
        "the cable of a busy worker's host is out for 10 s: its answers wait, new ones go elsewhere",
        lambda run: link_cut(run, Host.pull_cable),
        needs_hosts,
    ),
    Fault(
        "link-silent",
        "the same with a link that carries nothing and tells nobody",
        lambda run: link_cut(run, Host.go_silent),
        needs_hosts,
    ),
    Fault(
        "host-lost",
        "the power of a busy worker's host goes; a worker on another host takes its place",
        host_lost,
        needs_hosts,
    ),
)
