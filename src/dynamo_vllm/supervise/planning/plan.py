"""Turns a topology into the processes that `serve` starts. Pure: nothing is opened, started or
created here.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import build, checks, forks, planes, runtime_env, topology, worker_plan
from dynamo_vllm.config.options import FrontendOptions, WorkerOptions
from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.config.rules.flags import flag
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.supervise.planning import secrets as planning_secrets
from dynamo_vllm.supervise.planning.assigned_ports import AssignedPorts
from dynamo_vllm.supervise.planning.gpu_pool import VARIABLE, GpuPool, share_of
from dynamo_vllm.supervise.run_folder import EMBEDDINGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dynamo_vllm.config.role_cards import RoleCard
    from dynamo_vllm.config.topology import Topology, WorkerGroup
    from dynamo_vllm.config.worker_plan import WorkerPlan

# -P keeps the current folder off the module path, as the installed command does.
COMMAND = (sys.executable, "-P", "-m", "dynamo_vllm.cli.main")
LOOPBACK = "127.0.0.1"
ENGINES_HERE = "DYN_VLLM_ENGINES_HERE"
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
class Plan:
    """Everything that `serve` starts, and where it will answer."""

    url: str
    """URL of the frontend, without a path."""
    host: str
    port: int
    models: tuple[str, ...]
    """Folder or hub id of each group's model."""
    processes: tuple[Process, ...]
    front: FrontendOptions
    """Settings of the frontend; every process uses the same discovery and planes."""
    named_ports: frozenset[int] = frozenset()
    """Where the user wants processes to listen."""

    @property
    def workers(self) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.is_worker)


def make(
    wanted: Topology,
    environment: Mapping[str, str],
    discovery: Path,
    gpus: Sequence[str] = (),
    *,
    elsewhere: bool = False,
) -> Plan:
    """Return the processes of a topology; settings that cannot work are rejected here.

    `gpus` are assigned to several workers; without any, each sees what the environment shows. Processes that
    will run `elsewhere` are not checked against this machine.
    """
    shared = shared_environment(environment, discovery)
    front = build.from_values(FrontendOptions, wanted.frontend, shared)
    checks.check_frontend(front, elsewhere=elsewhere)
    shared = with_planes(shared, front, environment)
    front = build.from_values(FrontendOptions, wanted.frontend, shared)
    url = f"{'https' if front.tls_cert_path else 'http'}://{reachable(front.host)}:{front.port}"
    words, secrets = topology.to_argv(FrontendOptions, wanted.frontend), dict[str, str]()
    if not elsewhere:
        words, secrets = planning_secrets.by_environment(FrontendOptions, words)
    frontend = Process(
        name="frontend",
        argv=(*COMMAND, "frontend", *words),
        env={**shared, **secrets},
        health=f"{url}/live",
        port=front.port,
        drain_seconds=front.drain_seconds,
        role=None,
    )
    several = sum(group.count for group in wanted.workers) > 1
    has_encoders = any(_is_encoder(group, shared) for group in wanted.workers)
    embeddings = discovery.with_name(EMBEDDINGS) if has_encoders else None
    workers = _Workers(
        wanted.model, shared, environment, gpus if several else (), front, embeddings, elsewhere
    )
    for group in wanted.workers:
        workers.add(group)
    workers.check_roles()
    processes = (frontend, *counted(workers.made))
    return Plan(url, front.host, front.port, tuple(workers.models), processes, front, workers.named_ports)


def shared_environment(environment: Mapping[str, str], discovery: Path) -> dict[str, str]:
    """One machine, no services; the user's environment wins."""
    defaults = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(discovery),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_VLLM_BIND_HOST": LOOPBACK,
        "PYTHONUNBUFFERED": "1",
    }
    # One port cannot serve several processes: each worker gets its own as a flag.
    return {name: value for name, value in {**defaults, **environment}.items() if name != "DYN_SYSTEM_PORT"}


def with_planes(
    shared: Mapping[str, str], front: FrontendOptions, environment: Mapping[str, str]
) -> dict[str, str]:
    """Pass the frontend's discovery and plane settings to the workers too.

    A deployment that other machines can find advertises this machine's address, not loopback.
    """
    found = {**shared, **runtime_env.planes(front)}
    servers = planes.servers(front, front.event_plane)
    is_shared = front.discovery_backend == "kubernetes" or (
        front.discovery_backend == "etcd" and not planes.is_on_this_machine(servers)
    )
    if is_shared and "DYN_VLLM_BIND_HOST" not in environment:
        del found["DYN_VLLM_BIND_HOST"]
    return found


def counted(workers: Sequence[Process]) -> list[Process]:
    """Tell every worker the number of engines: on a CPU they share memory and cores."""
    engines = sum(worker.engines for worker in workers)
    told = {ENGINES_HERE: str(engines)} if engines > 1 else {}
    return [dataclasses.replace(worker, env={**told, **worker.env}) for worker in workers]


def reachable(host: str) -> str:
    """Return an address for connecting to a process that listens on `host`, as written in a URL."""
    host = _ANY.get(host, host)
    return f"[{host}]" if ":" in host else host


def _is_encoder(group: WorkerGroup, env: Mapping[str, str]) -> bool:
    return _parse(group.options, group, {**env, **group.env}).options.card.encodes_media


class _Workers:
    """Counts names and GPUs while groups become processes."""

    def __init__(
        self,
        model: str | None,
        shared: Mapping[str, str],
        environment: Mapping[str, str],
        gpus: Sequence[str],
        front: FrontendOptions,
        embeddings: Path | None,
        elsewhere: bool,
    ) -> None:
        self._elsewhere = elsewhere
        self._embeddings = embeddings
        """The folder of encode workers, if there are some."""
        self.made: list[Process] = []
        self.models: list[str] = []
        self._model = model
        self._shared = shared
        self._system_port = environment.get("DYN_SYSTEM_PORT")
        self._front = front
        self._names: Counter[str] = Counter()
        self._ports = AssignedPorts(front)
        self._roles: dict[tuple[str, str], str] = {}
        """By address and name of the model."""
        self._folders: dict[str, str] = {}
        """The model at each address."""
        self._gpus = GpuPool(gpus)

    @property
    def named_ports(self) -> frozenset[int]:
        return self._ports.named

    def add(self, group: WorkerGroup) -> None:
        values = {"model": self._model} if self._model is not None else {}
        if self._system_port:
            values["system_port"] = self._system_port
        values |= group.options
        env = {**self._shared, **group.env, **topology.secrets(WorkerOptions, group.options)}
        worker = _parse(values, group, env)
        if more := self._defaults(worker):
            values |= more
            worker = _parse(values, group, env)
        checks.check_worker(worker, elsewhere=self._elsewhere)
        options, node = worker.options, worker.node
        self._check_planes(options)
        self._check_media_hosts(options)
        self._check_address(options)
        self.models.append(str(options.model))
        engines = 0 if options.engine == "fake" else node.engines
        share = 0.0 if options.omni else share_of(worker.flags)  # a pipeline's file has those of its stages
        argv = _argv(values, group)
        if not self._elsewhere:
            argv, secrets = planning_secrets.by_environment(WorkerOptions, argv)
            env |= secrets
        for _ in range(group.count):
            name = self._name(options)
            gpus = self._gpus.give(name, group.env.get(VARIABLE), engines, share)
            self._one(name, options, argv, env | gpus, node.local_ranks, engines)

    def check_roles(self) -> None:
        """Check when all groups are known."""
        answering = {name for (_, name), role in self._roles.items() if not CARDS[role].helps_others}
        for (_, name), role in self._roles.items():
            if name not in answering:
                lacks = "with 'role: decode'" if CARDS[role].gives_kv else "that answers"
                raise ConfigError(f"{name} has {role} workers only; add a group {lacks}")

    def _defaults(self, worker: WorkerPlan) -> dict[str, Any]:
        """Return what a role needs besides its name; the user's settings win."""
        options, engine = worker.options, worker.flags
        more: dict[str, Any] = {}
        if self._is_taken(options) and options.component is None and options.endpoint is None:
            more["component"] = self._other_component(options)
        if options.card.hands_over_kv:
            if options.connector == worker_plan.HANDS_OVER:  # written out, for readers of manifests
                more["connector"] = worker_plan.HANDS_OVER
            publishes = options.kv_events is not None or "kv_events_config" in engine
            if options.card.takes_kv and self._front.local_prefill_tokens is not None and not publishes:
                more["kv_events"] = True
        if self._embeddings is not None:
            more["enable_multimodal"] = True
            takes_part = options.card.encodes_media or options.asks_encoders
            if takes_part and worker.encoder_folder is None:
                more["ec_storage_path"] = str(self._embeddings)
        return more

    def _is_taken(self, options: WorkerOptions) -> bool:
        """Return whether another model has the address: the runtime (1.6.1) allows one model per endpoint."""
        return self._folders.get(options.address, options.model) != options.model

    def _other_component(self, options: WorkerOptions) -> str:
        """Return backend-2 if backend is taken, or the next one that is free or has this model."""
        component = options.address.split(".")[-2]
        names = (f"{component}-{number}" for number in itertools.count(2))
        return next(
            name for name in names if not self._is_taken(dataclasses.replace(options, component=name))
        )

    def _check_planes(self, options: WorkerOptions) -> None:
        for name in runtime_env.PLANES:
            mine, others = getattr(options, name), getattr(self._front, name)
            if mine != others:
                raise ConfigError(
                    f"a worker has {flag(name)} {mine} and the frontend {others}, so they would not meet; "
                    "give it on the command line, which is for both"
                )

    def _check_media_hosts(self, options: WorkerOptions) -> None:
        if options.media_hosts and not self._front.media_hosts:
            raise ConfigError(
                "a worker has --media-hosts and the frontend, which asks for pictures too, has none; give it "
                "on the command line, which is for both, or under 'frontend' as well"
            )

    def _check_address(self, options: WorkerOptions) -> None:
        """The frontend sends prompts to every worker at a prefill worker's address."""
        if self._is_taken(options):
            raise ConfigError(
                f"{options.model} and {self._folders[options.address]} would both be at {options.address}; "
                "leave --component and --endpoint out, or give each model its own"
            )
        self._folders[options.address] = str(options.model)
        name = (options.served_model_name or (str(options.model),))[0]
        other = self._roles.setdefault((options.address, name), options.role)
        if other != options.role and (CARDS[other].helps_others or options.card.helps_others):
            raise ConfigError(
                f"{other} and {options.role} workers of {name} would both be at {options.address}; "
                "leave --component and --endpoint out, or give each group its own"
            )

    def _name(self, options: WorkerOptions) -> str:
        kind = options.card.process_name
        self._names[kind] += 1
        return f"{kind}-{self._names[kind]}"

    def _one(
        self,
        name: str,
        options: WorkerOptions,
        argv: list[str],
        env: Mapping[str, str],
        ranks: int,
        engines: int,
    ) -> None:
        ports = {
            "kv_event_port": self._ports.next(name, "kv_event_port", options.kv_event_port, ranks),
            # vLLM 0.30: a data-parallel rank adds its number; the shards of one rank share its port.
            "side_channel_port": self._ports.next(
                name, "side_channel_port", options.side_channel_port, ranks
            ),
        }
        more = [f"{flag(option)}={port}" for option, port in ports.items() if port]
        host = options.system_host or env.get("DYN_SYSTEM_HOST") or options.bind_host or "0.0.0.0"
        self.made.append(
            Process(
                name=name,
                argv=(*COMMAND, "worker", *argv, *more),
                env=env,
                health=f"http://{reachable(host)}:{{port}}/live",  # also for one that was told to sleep
                port=self._ports.next(name, "system_port", options.system_port),
                card_port=self._ports.next(name, "card_port", options.card_port),
                drain_seconds=options.drain_seconds,
                role=options.role,
                engines=engines,
                forks=forks.why_not(options, env) is None,
            )
        )


def parse(argv: Sequence[str]) -> WorkerPlan:
    """Return the arguments of a worker's command."""
    return worker_plan.parse(argv, {})


def _argv(values: topology.Values, group: WorkerGroup) -> list[str]:
    return [*topology.to_argv(WorkerOptions, values), *group.args]


def _parse(values: topology.Values, group: WorkerGroup, env: Mapping[str, str]) -> WorkerPlan:
    return worker_plan.parse(_argv(values, group), env)
