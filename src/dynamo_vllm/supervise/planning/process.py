"""Describes the processes of a `serve` as data: what each runs, and where it answers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dynamo_vllm.config.role_cards import CARDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.options import FrontendOptions
    from dynamo_vllm.config.role_cards import RoleCard

# -P keeps the current folder off the module path, as the installed command does.
COMMAND = (sys.executable, "-P", "-m", "dynamo_vllm.cli.main")
LOOPBACK = "127.0.0.1"
_ANY = {"0.0.0.0": LOOPBACK, "::": "::1"}


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start and keep running."""

    name: str
    argv: tuple[str, ...]
    """The command, without what differs at each start: a worker's two ports and the status pipe."""
    env: Mapping[str, str]
    """Its complete environment."""
    health: str
    """Its health URL; {port} is the placeholder for the port."""
    port: int | None
    """Port of `health`; None takes a free one at each start."""
    drain_seconds: float
    role: str | None
    """The role of a worker; None for the frontend."""
    engines: int = 0
    """Number of engines on this node, each with one GPU; the fake engine does not count."""
    card_port: int | None = None
    """Port of the runtime's server behind a worker's `port`; None takes a free one at each start."""
    forks: bool = False
    """Whether it may be forked from a process that has imported vLLM."""
    is_essential: bool = True
    """Whether `serve` waits for it and ends when it cannot live; if not, it is only tried again."""
    url: str | None = None
    """Where people reach a process that is not essential; shown once it is ready."""
    group: str = field(default="", compare=False)
    """Name of the group of a worker."""

    @property
    def is_worker(self) -> bool:
        return self.role is not None

    @property
    def card(self) -> RoleCard | None:
        """Of a worker's role."""
        return None if self.role is None else CARDS[self.role]

    def command(self, port: int, card_port: int | None = None) -> list[str]:
        """`card_port` is a worker's second port; chosen here, because workers that each look for one would
        collide."""
        ports = ["--system-port", str(port)] if self.is_worker else []
        if card_port is not None:
            ports += ["--card-port", str(card_port)]
        return [*self.argv, *ports]

    def health_url(self, port: int) -> str:
        return self.health.format(port=port)


@dataclass(frozen=True, slots=True)
class Group:
    """What the workers of a group have in common."""

    name: str
    model: str
    """Name of the model that they serve."""
    role: str
    is_headless: bool = False
    """They run engines for a worker on another node, which takes the requests."""


class WorkerPool(Protocol):
    """Plans workers of the groups of a running `serve`."""

    @property
    def groups(self) -> Mapping[str, Group]:
        """The groups by their names."""

    def more(self, group: str, running: Sequence[Process], count: int) -> list[Process]:
        """Return `count` more workers of a group beside all `running` ones.

        Raises ConfigError or StartError where the machine has no room for them.
        """

    def release(self, worker: Process) -> None:
        """Take back the name, ports and GPUs of a worker that has ended for good."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `serve` starts, and where it will answer."""

    url: str
    """URL for clients, without a path."""
    host: str
    port: int
    models: tuple[str, ...]
    """Folder or hub id of each group's model."""
    processes: tuple[Process, ...]
    front: FrontendOptions
    """Settings of the frontend; every process uses the same discovery and planes."""
    named_ports: frozenset[int] = frozenset()
    """Where the user wants processes to listen."""
    frontend_url: str = ""
    """URL of the frontend itself; another one than `url` behind a gateway."""
    needs_key: bool = False
    """Whether clients must send a key of the gateway."""
    said: str | None = None
    """What was shared out among the workers."""
    pool: WorkerPool | None = field(default=None, compare=False, repr=False)
    """Plans more workers of its groups while `serve` runs."""

    @property
    def has_gateway(self) -> bool:
        return self.frontend_url not in ("", self.url)

    @property
    def workers(self) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.is_worker)


def reachable(host: str) -> str:
    """Return an address for connecting to a process that listens on `host`, as written in a URL."""
    host = _ANY.get(host, host)
    return f"[{host}]" if ":" in host else host
