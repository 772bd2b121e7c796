"""Turns groups of workers into processes: names, ports, GPUs, and the checks across groups."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import checks, forks, runtime_env, topology, worker_plan
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.config.rules.flags import flag
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.supervise.planning import secrets as planning_secrets
from dynamo_vllm.supervise.planning.assigned_ports import AssignedPorts
from dynamo_vllm.supervise.planning.gpu_pool import VARIABLE, GpuPool, share_of
from dynamo_vllm.supervise.planning.process import COMMAND, Group, Process, reachable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dynamo_vllm.config.options import FrontendOptions
    from dynamo_vllm.config.topology import WorkerGroup
    from dynamo_vllm.config.worker_plan import WorkerPlan


ENGINES_HERE = "DYN_VLLM_ENGINES_HERE"


@dataclass(frozen=True, slots=True)
class GroupTemplate:
    """What every worker of a group is made of."""

    group: Group
    worker: WorkerPlan
    argv: tuple[str, ...]
    env: Mapping[str, str]
    named_gpus: str | None
    engines: int
    share: float
    """Of the memory of each GPU."""


class WorkerProcesses:
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
        is_alone: bool,
    ) -> None:
        self._elsewhere = elsewhere
        self._is_alone = is_alone
        """There is one worker, which sees every GPU that the environment shows."""
        self._embeddings = embeddings
        """The folder of encode workers, if there are some."""
        self.made: list[Process] = []
        self.models: list[str] = []
        self.plans: list[tuple[WorkerPlan, int]] = []
        """Of each group, and how many workers it has."""
        self._model = model
        self._shared = shared
        self._system_port = environment.get("DYN_SYSTEM_PORT")
        self._front = front
        self._names: set[str] = set()
        self.templates: dict[str, GroupTemplate] = {}
        self._ports = AssignedPorts(front)
        self._roles: dict[tuple[str, str], str] = {}
        """By address and name of the model."""
        self._folders: dict[str, str] = {}
        """The model at each address."""
        self._gpus = GpuPool(gpus)

    @property
    def named_ports(self) -> frozenset[int]:
        return self._ports.named

    def keep_port(self, port: int, owner: str) -> None:
        """Keep a port for something that is no worker; raise if it is another's."""
        self._ports.keep(port, owner)

    def add(self, group: WorkerGroup) -> None:
        values = {"model": self._model} if self._model is not None else {}
        if self._system_port:
            values["system_port"] = self._system_port
        values |= group.options
        env = {**self._shared, **group.env, **topology.secrets(WorkerOptions, group.options)}
        worker = parse_group(values, group, env)
        if more := self._defaults(worker):
            values |= more
            worker = parse_group(values, group, env)
        checks.check_worker(worker, elsewhere=self._elsewhere)
        options, node = worker.options, worker.node
        self._check_planes(options)
        self._check_media_hosts(options)
        self._check_address(options)
        self._check_namespace(options)
        self.models.append(str(options.model))
        self.plans.append((worker, group.count))
        engines = 0 if options.engine == "fake" else node.engines
        share = 0.0 if options.omni else share_of(worker.flags)  # a pipeline's file has those of its stages
        argv = _argv(values, group)
        if not self._elsewhere:
            argv, secrets = planning_secrets.by_environment(WorkerOptions, argv)
            env |= secrets
        name = group.name or options.card.process_name
        kind = Group(name, _served_name(options), options.role, node.is_headless)
        template = GroupTemplate(kind, worker, tuple(argv), env, group.env.get(VARIABLE), engines, share)
        # Groups of one name are parts of one that was split over GPUs.
        self.templates.setdefault(kind.name, template)
        self.made += (self.one_more(template, is_first=True) for _ in range(group.count))

    def one_more(self, template: GroupTemplate, *, is_first: bool = False) -> Process:
        """Return a process with a name, ports and GPUs that no other has; `is_first`: when serve starts."""
        name = self._name(template.worker.options)
        asked = (name, template.named_gpus, template.engines, template.share)
        try:
            if is_first and self._is_alone:
                self._gpus.occupy(*asked)
                return self._one(name, template, {})
            return self._one(name, template, self._gpus.assign(*asked))
        except ConfigError:
            self.release(name)
            raise

    def release(self, name: str) -> None:
        """Take back what `one_more` gave."""
        self._names.discard(name)
        self._gpus.release(name)
        self._ports.release(name)

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
            # Written out, for readers of manifests.
            if options.connector in (worker_plan.HANDS_OVER, (*worker_plan.HANDS_OVER, worker_plan.TIERS)):
                more["connector"] = options.connector
            publishes = options.kv_events is not None or "kv_events_config" in engine
            if options.card.takes_kv and self._front.local_prefill_tokens is not None and not publishes:
                more["kv_events"] = True
        if self._embeddings is not None:
            more["enable_multimodal"] = True
            takes_part = options.card.encodes_media or options.asks_encoders
            if takes_part and worker.encoder_output is None:
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
                    f"a worker has {flag(name)} {mine} and the frontend {others}, so they would not find "
                    "each other; "
                    "set it on the command line, which applies to both"
                )

    def _check_media_hosts(self, options: WorkerOptions) -> None:
        if options.media_hosts and not self._front.media_hosts:
            raise ConfigError(
                "a worker has --media-hosts and the frontend, which fetches images too, has none; set it "
                "on the command line, which applies to both, or under 'frontend' as well"
            )

    def _check_address(self, options: WorkerOptions) -> None:
        """The frontend sends prompts to every worker at a prefill worker's address."""
        if self._is_taken(options):
            raise ConfigError(
                f"{options.model} and {self._folders[options.address]} would both be at {options.address}; "
                "leave --component and --endpoint out, or give each model its own"
            )
        self._folders[options.address] = str(options.model)
        name = _served_name(options)
        other = self._roles.setdefault((options.address, name), options.role)
        if other != options.role and (CARDS[other].helps_others or options.card.helps_others):
            raise ConfigError(
                f"{other} and {options.role} workers of {name} would both be at {options.address}; "
                "leave --component and --endpoint out, or give each group its own"
            )

    def _check_namespace(self, options: WorkerOptions) -> None:
        """Encode workers may be anywhere: others find them by their address."""
        theirs, ours = options.namespace, self._front.namespace
        prefix = self._front.namespace_prefix
        is_seen = theirs == ours if prefix is None else theirs.startswith(prefix)
        if options.card.is_listed and not is_seen:
            raise ConfigError(
                f"a worker is in the namespace {theirs} and the frontend in {prefix or ours}, so they would "
                f"not find each other; add --namespace {theirs}, which applies to both"
            )

    def _name(self, options: WorkerOptions) -> str:
        kind = options.card.process_name
        names = (f"{kind}-{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name

    def _one(self, name: str, template: GroupTemplate, gpus: Mapping[str, str]) -> Process:
        options, ranks = template.worker.options, template.worker.node.local_ranks
        env = {**template.env, **gpus}
        ports = {
            "kv_event_port": self._ports.next(name, "kv_event_port", options.kv_event_port, ranks),
            # vLLM 0.30: a data-parallel rank adds its number; the shards of one rank share its port.
            "side_channel_port": self._ports.next(
                name, "side_channel_port", options.side_channel_port, ranks
            ),
        }
        more = [f"{flag(option)}={port}" for option, port in ports.items() if port]
        host = options.system_host or env.get("DYN_SYSTEM_HOST") or options.bind_host or "0.0.0.0"
        return Process(
            name=name,
            argv=(*COMMAND, "worker", *template.argv, *more),
            env=env,
            health=f"http://{reachable(host)}:{{port}}/live",  # also for one that sleeps
            port=self._ports.next(name, "system_port", options.system_port),
            card_port=self._ports.next(name, "card_port", options.card_port),
            drain_seconds=options.drain_seconds,
            role=options.role,
            engines=template.engines,
            forks=forks.why_not_forked(options, env) is None,
            group=template.group.name,
        )


def with_engine_count(workers: Sequence[Process], beside: Sequence[Process] = ()) -> list[Process]:
    """Tell every worker the number of engines: on a CPU they share memory and cores."""
    engines = sum(worker.engines for worker in (*workers, *beside))
    env = {ENGINES_HERE: str(engines)} if engines > 1 else {}
    return [dataclasses.replace(worker, env={**env, **worker.env}) for worker in workers]


def _served_name(options: WorkerOptions) -> str:
    return (options.served_model_name or (str(options.model),))[0]


def _argv(values: topology.Values, group: WorkerGroup) -> list[str]:
    return [*topology.to_argv(WorkerOptions, values), *group.args]


def parse_group(values: topology.Values, group: WorkerGroup, env: Mapping[str, str]) -> WorkerPlan:
    return worker_plan.parse(_argv(values, group), env)
