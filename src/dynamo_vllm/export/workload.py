"""Converts a topology into the workloads of a cluster: the processes of `serve`, without local settings."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from dynamo_vllm.config import build, topology, worker_plan
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.options.kv_cache import OFFLOAD_GB
from dynamo_vllm.config.rules.flags import flag
from dynamo_vllm.config.runtime_env import PLANES
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.export import gateway as gateways
from dynamo_vllm.supervise.limits import SupervisorLimits
from dynamo_vllm.supervise.planning import plan as plans
from dynamo_vllm.supervise.planning import tiers
from dynamo_vllm.supervise.planning.gateway import taking_turns
from dynamo_vllm.supervise.planning.process import COMMAND
from dynamo_vllm.supervise.planning.workers import ENGINES_HERE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.options.kv_cache import DiskSpace
    from dynamo_vllm.config.topology import Topology, Values, WorkerGroup
    from dynamo_vllm.export.gateway import Gateway
    from dynamo_vllm.supervise.planning.process import Plan, Process

MODELS = gateways.MODELS
"""Where every container mounts the model volume."""
SHARED = "/shared"
"""The shared folder of encode workers."""
KV = "/kv"
"""A folder of the image for KV caches on disk."""
SYSTEM_PORT = 9090
MIN_PORT = 1024
"""A process needs a capability for ports below this one."""
LEADER = "leader.invalid"
"""Placeholder for the address of a worker's first node until it has a name."""
GPUS = "CUDA_VISIBLE_DEVICES"
PRE_STOP_SECONDS = 5
"""The pause between a pod's removal from discovery and its SIGTERM, after which it gets no new requests."""
SPARE_SECONDS = 5
_LIMITS = SupervisorLimits()
_ENDS_WITH = len(COMMAND)

_PLANES = ("request_plane", "event_plane")
_LOCAL = (*PLANES, "bind_host", "system_host", "system_port")
_LOCAL_OF_FRONTEND = (*_LOCAL, "host")
_PORTS = ("kv_event_port", "side_channel_port", "card_port")
"""Options for the first ports of several processes on one machine; containers do not share ports."""
_FILES = ("model", "custom_jinja_template", "stage_configs_path", "media_folder", "lora_path")
_FILES_OF_FRONTEND = ("tls_cert_path", "tls_key_path")
_FILES_OF_VLLM = ("tokenizer", "hf_config_path", "generation_config", "download_dir")
_WRITTEN = {
    "ec_storage_path": (SHARED, MODELS),
    "dump_config_to": ("/tmp", MODELS),
    "usage_dir": ("/tmp",),
    "prometheus_multiproc_dir": ("/tmp", MODELS),
}
"""Where containers can write those files."""
_MOUNTED = ("/", "/tmp", "/dev", "/dev/shm", MODELS, SHARED)
"""Where containers have something else."""
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|_KEY)$")
_BALANCED = ("data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_rank")


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder of a worker that outlives its restart."""

    path: str
    gib: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A group of identical processes."""

    name: str
    role: str | None
    """The role of a worker; None for the frontend."""
    args: tuple[str, ...]
    """The arguments of the command: `worker --model=…`."""
    env: Mapping[str, str]
    """The environment variables of the user's file."""
    drain_seconds: float
    count: int = 1
    gpus: int = 0
    """The GPUs of one process."""
    gpu_ids: tuple[str, ...] = ()
    """The numbers of these GPUs, on a single machine."""
    nodes: int = 1
    """Processes that make up one worker."""
    port: int = SYSTEM_PORT
    secrets: tuple[str, ...] = ()
    """Variables whose values are secret."""
    has_tls: bool = False
    """Whether its port uses HTTPS."""
    shares_embeddings: bool = False
    """Whether it needs the folder that encode workers and their users share."""
    tier_gib: int = 0
    """Shared memory for KV caches that leave the engine."""
    disk: Disk | None = None
    """Disk space for KV caches that leave the shared memory."""

    @property
    def is_worker(self) -> bool:
        return self.role is not None

    @property
    def grace_seconds(self) -> int:
        return grace_seconds(self.drain_seconds)


def grace_seconds(drain_seconds: float) -> int:
    """Return the seconds from SIGTERM to SIGKILL: as long as `serve` waits, plus the pause before it."""
    return math.ceil(PRE_STOP_SECONDS + drain_seconds + _LIMITS.stop_seconds + SPARE_SECONDS)


@dataclass(frozen=True, slots=True)
class Workloads:
    """All workloads of a file."""

    frontend: Workload
    workers: tuple[Workload, ...]
    host: str
    """The host on which the frontend listens."""
    notes: tuple[str, ...] = ()
    """What was left out or replaced."""
    request_plane: str = "tcp"
    event_plane: str = "zmq"
    gateway: Gateway | None = None
    """What stands in front of the frontend."""

    @property
    def all(self) -> tuple[Workload, ...]:
        return (self.frontend, *self.workers)


@dataclass(slots=True)
class _Notes:
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        if text not in self.texts:
            self.texts.append(text)


def of_cluster(wanted: Topology, discovery: str, secrets: str = "NAME-secrets") -> Workloads:
    """Return one workload per group, for a cluster; a worker may span nodes."""
    notes = _Notes()
    wanted, _ = tiers.share_out(_taking_turns(wanted), {})
    groups = [_for_cluster(group) for group in wanted.workers]
    if any(GPUS in group.env for group in wanted.workers):
        notes.add(f"{GPUS} of a group is left out: the cluster gives each worker its GPUs")
    ready = dataclasses.replace(wanted, workers=tuple(group for group, _ in groups))
    bare = _bare(ready, discovery, notes, secrets)
    one_each = tuple(dataclasses.replace(group, count=1) for group in bare.workers)
    plan = _plan(dataclasses.replace(bare, workers=one_each))
    made = []
    for (_, nodes), group, ports, process in zip(
        groups, bare.workers, _ports(wanted), plan.workers, strict=True
    ):
        workload = _workload(process, group, _kind(process.name), ports)
        if nodes > 1:
            words = (*workload.args, "--node-rank", "$(NODE_RANK)")
            workload = dataclasses.replace(workload, args=words, nodes=nodes)
        made.append(dataclasses.replace(workload, count=group.count))
    return _all(plan, wanted, made, notes, secrets)


def of_machine(wanted: Topology, gpus: bool) -> Workloads:
    """Return one workload per process, for a single machine; each has its own GPUs."""
    notes = _Notes()
    wanted = _taking_turns(wanted)
    for group in wanted.workers:
        if _nodes(group) > 1:
            raise ConfigError(
                f"a worker over {_nodes(group)} nodes is for a cluster; use 'dynamo-vllm export k8s', or "
                "leave --nnodes and --data-parallel-size-local out"
            )
    bare = _bare(wanted, "etcd", notes)
    width = sum(process.engines for process in _plan(bare).workers)
    plan = _plan(bare, [str(number) for number in range(width)] if gpus else [])
    groups = [(group, ports) for group, ports in zip(bare.workers, _ports(wanted), strict=True)]
    each = [pair for pair in groups for _ in range(pair[0].count)]
    made = []
    for process, (group, ports) in zip(plan.workers, each, strict=True):
        workload = _workload(process, group, process.name, ports)
        ids = [gpu for gpu in process.env.get(GPUS, "").split(",") if gpu]
        if gpus and process.engines:
            ids = ids or [str(number) for number in range(process.engines)]
            workload = dataclasses.replace(workload, gpu_ids=tuple(ids))
        elif engines := process.env.get(ENGINES_HERE):  # the containers share the machine's memory
            workload = dataclasses.replace(workload, env={ENGINES_HERE: engines, **workload.env})
        made.append(workload)
    return _all(plan, wanted, made, notes, None)


def _taking_turns(wanted: Topology) -> Topology:
    """Return the topology with workers for tenants that take turns, if it has a gateway."""
    if wanted.gateway is None:
        return wanted
    return dataclasses.replace(wanted, workers=tuple(taking_turns(group, {}) for group in wanted.workers))


def _all(
    plan: Plan, wanted: Topology, workers: Sequence[Workload], notes: _Notes, secrets: str | None
) -> Workloads:
    if plan.port < MIN_PORT:
        raise ConfigError(
            f"frontend: port {plan.port}: give one from {MIN_PORT} on; containers may not use lower ones"
        )
    front = plan.processes[0]
    frontend = Workload(
        name="frontend",
        role=None,
        args=front.argv[_ENDS_WITH:],
        env={},
        drain_seconds=front.drain_seconds,
        port=plan.port,
        has_tls=plan.front.tls_cert_path is not None,
    )
    host = str(wanted.frontend.get("host", plan.host))
    gateway = None
    if wanted.gateway is not None:
        gateway, said = gateways.of(wanted.gateway, wanted.frontend)
        for text in said:
            notes.add(text)
        if gateway.secrets:
            notes.add(_not_written(gateway.secrets, secrets))
    return Workloads(frontend, tuple(workers), host, tuple(notes.texts), gateway=gateway, **_planes(wanted))


def _planes(wanted: Topology) -> dict[str, str]:
    """Return the planes of the frontend, or of the first group that names one; all processes share them."""
    given = [wanted.frontend, *(group.options for group in wanted.workers)]
    return {name: str(values[name]) for name in _PLANES for values in reversed(given) if name in values}


def _workload(process: Process, group: WorkerGroup, name: str, ports: Values) -> Workload:
    secrets = topology.secrets(WorkerOptions, group.options)
    options = plans.parse(process.argv[_ENDS_WITH + 1 :]).options
    in_folder = options.ec_storage_path is not None and options.encoder_transfer == "file"
    return Workload(
        name=name,
        role=process.role,
        args=(*process.argv[_ENDS_WITH:], *topology.to_argv(WorkerOptions, ports)),
        env={key: value for key, value in group.env.items() if key != GPUS},
        drain_seconds=process.drain_seconds,
        gpus=process.engines,
        secrets=tuple(secrets),
        shares_embeddings=in_folder,
        tier_gib=_gib(options.kv_offload_gb or OFFLOAD_GB) if worker_plan.TIERS in options.connector else 0,
        disk=_disk(options.kv_disk),
    )


def _disk(space: DiskSpace | None) -> Disk | None:
    """Return the disk space with room for what files take besides their content."""
    if space is None:
        return None
    path = PurePosixPath(space.path)
    if not path.is_absolute() or ".." in path.parts or any(path == PurePosixPath(own) for own in _MOUNTED):
        raise ConfigError(
            f"--kv-offload-disk {space}: containers need a volume there; name an absolute path of its own, "
            f"such as {KV}"
        )
    return Disk(str(path), _gib(1.1 * space.gb))


def _gib(gb: float) -> int:
    return math.ceil(gb * 10**9 / (1 << 30))


def _plan(wanted: Topology, gpus: Sequence[str] = ()) -> Plan:
    return plans.make(wanted, {}, Path(SHARED, "discovery"), gpus, elsewhere=True)


def _kind(name: str) -> str:
    """Return worker for worker-1, and worker-2 as it is: the first of its kind needs no number."""
    return name.removesuffix("-1")


def _ports(wanted: Topology) -> list[Values]:
    return [
        {name: value for name, value in group.options.items() if name in _PORTS} for group in wanted.workers
    ]


# --- what is local --------------------------------------------------------------------------------------


def _bare(wanted: Topology, discovery: str, notes: _Notes, secrets: str | None = None) -> Topology:
    """Remove what only this machine has; files must be on the model volume.

    `secrets` is where a cluster keeps them.
    """
    frontend = _without(wanted.frontend, _LOCAL_OF_FRONTEND, "frontend", discovery, notes)
    _refuse_files(frontend, _FILES_OF_FRONTEND)
    if wanted.gateway is not None:  # it ends TLS
        frontend = {name: value for name, value in frontend.items() if name not in _FILES_OF_FRONTEND}
    workers = []
    for number, group in enumerate(wanted.workers):
        options = _without(group.options, _LOCAL, f"workers[{number}]", discovery, notes)
        if not (options.get("model") or wanted.model):
            raise ConfigError("the file names no model; add 'model: ORGANISATION/NAME', or --model")
        _refuse_files({"model": wanted.model, **options}, _FILES)
        _refuse_files(_adapters(options), ("lora_modules",))
        _refuse_files(topology.plan_of(group).flags, _FILES_OF_VLLM)
        _refuse_unwritable(options)
        if secret := topology.secrets(WorkerOptions, options):
            notes.add(_not_written(tuple(secret), secrets))
        for name in filter(_SECRET.search, group.env):
            notes.add(f"workers[{number}]: env: {name} is written in plain text; a Secret is a better place")
        kept = {name: value for name, value in options.items() if name not in _PORTS}
        workers.append(dataclasses.replace(group, options=kept))
    return dataclasses.replace(wanted, frontend=frontend, workers=tuple(workers))


def _not_written(names: Sequence[str], secrets: str | None) -> str:
    where = "into .env" if secrets is None else f"into the Secret {secrets} before you apply this"
    return f"the value of {', '.join(names)} is not written to any file; put it {where}"


def _without(
    values: Values, names: Sequence[str], where: str, discovery: str, notes: _Notes
) -> dict[str, object]:
    for name in names:
        if name in _PLANES or name not in values:
            continue
        if name == "nats_server":
            notes.add(f"{where}: {name} {values[name]} is replaced: --nats names the server")
        elif name in PLANES:
            notes.add(f"{where}: {name} {values[name]} is replaced: processes find each other by {discovery}")
        elif name != "host":
            notes.add(f"{where}: {name} {values[name]} is left out: every container has its own address")
    return {name: value for name, value in values.items() if name not in names}


def _refuse_files(values: Values, names: Sequence[str]) -> None:
    """Raise for a path of this machine, which containers cannot see."""
    for name in names:
        value = values.get(name)
        may_be_a_name = name == "model" or name in _FILES_OF_VLLM
        if value is None or (may_be_a_name and not _is_path(str(value))):
            continue
        if not _is_below(str(value), (MODELS,)):
            raise ConfigError(
                f"{flag(name)} {value} is a path of this machine; put it on the volume of models, which "
                f"containers see at {MODELS}, and write {MODELS}/… (or a hub id for a model)"
            )


def _refuse_unwritable(values: Values) -> None:
    for name, places in _WRITTEN.items():
        value = values.get(name)
        if value is not None and not _is_below(str(value), places):
            raise ConfigError(
                f"{flag(name)} {value} cannot be written in a container; leave it out, or name a place below "
                f"{' or '.join(places)}"
            )


def _adapters(options: Values) -> Values:
    """Return the first adapter that is a local folder outside the model volume."""
    modules = build.from_values(
        WorkerOptions, {"lora_modules": options.get("lora_modules", ())}, {}
    ).lora_modules
    for uri in (word.partition("=")[2].removeprefix("file://") for word in modules):
        if uri and "://" not in uri and not _is_below(uri, (MODELS,)):
            return {"lora_modules": uri}
    return {}


def _is_below(path: str, places: Sequence[str]) -> bool:
    parts = PurePosixPath(path)
    return ".." not in parts.parts and any(parts.is_relative_to(place) for place in places)


def _is_path(model: str) -> bool:
    """Return whether it is a path; a hub id has at most one slash and begins with a letter or digit."""
    return model.startswith(("/", ".", "~")) or (model.count("/") > 1 and "://" not in model)


# --- workers over several nodes -------------------------------------------------------------------------


def _for_cluster(group: WorkerGroup) -> tuple[WorkerGroup, int]:
    """Return the group with what its nodes must know of each other, and their number."""
    nodes = _nodes(group)
    if nodes == 1:
        return group, 1
    given = topology.plan_of(group).flags
    for name in ("data_parallel_address", "master_addr", "node_rank", "data_parallel_start_rank"):
        if name in given:
            raise ConfigError(
                f"{flag(name)} {given[name]}: in a cluster pods have other addresses and get their ranks by "
                "their number; leave it out"
            )
    more = () if "nnodes" in given else ("--nnodes", str(nodes))
    return dataclasses.replace(group, args=(*group.args, *more, "--master-addr", LEADER)), nodes


def _nodes(group: WorkerGroup) -> int:
    given = topology.plan_of(group).flags
    ranks, local = _number(given, "data_parallel_size"), _number(given, "data_parallel_size_local")
    nodes = _number(given, "nnodes")
    if nodes is None:
        nodes = -(-ranks // local) if ranks and local else 1
    for name in _BALANCED:
        if name in given and (nodes > 1 or name == "data_parallel_rank"):
            raise ConfigError(
                f"{flag(name)} makes each node a worker of its own, whose rank only its user knows; leave it "
                "out (one worker then leads the nodes), or write the manifests by hand"
            )
    if group.options.get("headless"):
        raise ConfigError("a headless group belongs to a worker; describe the worker, nodes follow from it")
    return nodes


def _number(given: Mapping[str, str | None], name: str) -> int | None:
    text = given.get(name) or ""
    return int(text) if text.isdigit() and int(text) else None
