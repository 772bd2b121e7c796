"""The ways in which the processes of a test find and reach each other, with the servers that these need.

`DYNAMO_VLLM_TEST_PLANES=etcd,nats,nats pytest tests/e2e` runs a suite on other ones than file,tcp,zmq.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.servers import Server, etcd, nats

VARIABLE = "DYNAMO_VLLM_TEST_PLANES"


@dataclass(frozen=True)
class Planes:
    """Discovery, request and event plane."""

    discovery: str
    request: str
    event: str
    servers: Mapping[str, Server] = field(default_factory=dict)

    def of(self, named: str) -> Planes:
        """Others on the same servers."""
        discovery, request, event = named.split(",")
        return replace(self, discovery=discovery, request=request, event=event)

    def env(self, folder: Path) -> dict[str, str]:
        """For all processes of one test; each has a namespace of its own in a shared etcd."""
        found = {
            "DYN_DISCOVERY_BACKEND": self.discovery,
            "DYN_REQUEST_PLANE": self.request,
            "DYN_EVENT_PLANE": self.event,
        }
        if self.discovery == "etcd":
            found["ETCD_ENDPOINTS"] = self.servers["etcd"].url
            found["DYN_NAMESPACE"] = f"test-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        if "nats" in (self.request, self.event):
            found["NATS_SERVER"] = self.servers["nats"].url
        return found


@contextlib.contextmanager
def planes(named: str, folder: Path) -> Iterator[Planes]:
    """With the servers that `named`, such as etcd,nats,nats, needs."""
    discovery, request, event = named.split(",")
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        if discovery == "etcd":
            servers["etcd"] = stack.enter_context(etcd(folder))
        if "nats" in (request, event):
            servers["nats"] = stack.enter_context(nats(folder))
        yield Planes(discovery, request, event, servers)


_chosen: list[Planes] = []


@contextlib.contextmanager
def chosen(folder: Path) -> Iterator[None]:
    """While it lasts, tests that say nothing about planes run on those of the environment."""
    named = os.environ.get(VARIABLE)
    if not named:
        yield
        return
    with planes(named, folder) as made:
        _chosen.append(made)
        try:
            yield
        finally:
            _chosen.clear()


def chosen_env(folder: Path) -> dict[str, str]:
    return _chosen[0].env(folder) if _chosen else {}
