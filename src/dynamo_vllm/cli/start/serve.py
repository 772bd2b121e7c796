"""Runs `dynamo-vllm serve`: starts, supervises and stops a frontend and its workers on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm import ports
from dynamo_vllm.cli.start import gateway, serve_console
from dynamo_vllm.config import build, checks, folders, planes, topology
from dynamo_vllm.config.options import (
    ConsoleSettings,
    FrontendOptions,
    GatewaySettings,
    ServeOptions,
    WorkerOptions,
)
from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS
from dynamo_vllm.config.topology import CommandLine, Topology
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.vllm.compat import versions
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.serving import scratch
from dynamo_vllm.supervise import run_folder
from dynamo_vllm.supervise.limits import SupervisorLimits
from dynamo_vllm.supervise.planning import console as consoles
from dynamo_vllm.supervise.planning import demos, group_names, shared_gpus
from dynamo_vllm.supervise.planning import gateway as gateways
from dynamo_vllm.supervise.planning import plan as plans
from dynamo_vllm.supervise.planning.gateway import GatewayPlace

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from dynamo_vllm.supervise.planning.process import Plan
    from dynamo_vllm.supervise.run_folder import RunFolder

PROG = "dynamo-vllm serve"
DESCRIPTION = """\
Serve a model on this machine: the OpenAI server, its router and one or more workers.

  dynamo-vllm serve                         a small demo model that comes with the package
  dynamo-vllm serve --demo lora             the same with two adapters; also vision, image,
                                            search, speech, all
  dynamo-vllm serve MODEL                   a local folder or a hub id
  dynamo-vllm serve MODEL --workers 2 --port 8080 --max-model-len 8192
  dynamo-vllm serve MODEL --prefill 1 --decode 2
  dynamo-vllm serve --omni MODEL            a pipeline of vLLM-Omni: text or images
  dynamo-vllm serve --config deployment.yaml"""
EPILOG = """\
Every option of 'dynamo-vllm worker' (see its --help) and every engine flag of vLLM is accepted too
and passed on to each worker, for example --served-model-name, --max-model-len or --enforce-eager."""

CRASH_NOTES = "DYN_VLLM_CRASH_NOTES"
NOTED = (
    *("namespace", "discovery_backend", "file_kv", "etcd_endpoints"),
    *("request_plane", "nats_server", "bind_host"),
)
"""The frontend options that commands such as `status` need to find the workers."""


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(parser().format_help(), end="")
        return 0
    environment = folders.complete_environment(build.environment(), folders.for_worker)
    options, wanted = understand(argv, environment)
    folder = run_folder.choose(options.run_dir, environment)
    with scratch.folder() as shared:  # in memory or on a local disk; a cache may be on a network
        environment = {CRASH_NOTES: shared, **environment}
        wanted = with_gateway(wanted, options, environment)
        may_add = options.gateway is None and not options.open
        console = serve_console.settings(given_flags(argv), options, environment)
        plan = prepare(
            wanted,
            environment,
            folder,
            options.demo,
            Path(shared, "gateway"),
            may_add,
            console,
            options.gateway_console,
        )
        limits = SupervisorLimits(
            start_seconds=options.start_seconds,
            hang_seconds=options.hang_seconds,
            unwell_seconds=options.unwell_seconds,
            restarts=options.restarts,
            retry_seconds=options.retry_seconds,
            log_bytes=int(options.log_mb * (1 << 20)),
            log_parts=options.log_parts,
        )
        with folder.opened():
            run_folder.prune(environment, options.keep_runs)
            # Other commands have no key.
            folder.note(
                plan.frontend_url if plan.needs_key else plan.url,
                {name: getattr(plan.front, name) for name in NOTED},
                control := Path(shared, "control"),
                next((one.url for one in plan.processes if one.name == consoles.NAME), None),
            )
            code = supervise(plan, limits, folder, control)
            if code == 0:
                folder.forget()
    return code


def parser() -> build.Parser:
    """Return the parser of serve's own options and the frontend's."""
    made = build.parser(ServeOptions, PROG, DESCRIPTION, EPILOG)
    made.usage = f"{PROG} [MODEL] [options] [worker options] [vLLM flags]"
    build.add_options(made, FrontendOptions)
    build.add_options(made, GatewaySettings)
    build.add_options(made, ConsoleSettings)
    return made


# --- what was asked for ---------------------------------------------------------------------------------


def understand(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[ServeOptions, Topology]:
    """Combine the settings: the command line first, then the file, then the environment."""
    words = with_model_flag(argv)
    namespace, rest = parser().parse_known_args(words)
    given = vars(namespace)
    options = serve_options(given, environment)
    checks.check_serve(options)
    # Some flags concern both kinds of process, so the workers' parser gets all words. vLLM gets the words
    # that no parser knows.
    workers = build.parser(WorkerOptions, PROG, DESCRIPTION)
    for_workers, _ = workers.parse_known_args(words)
    _, for_vllm = workers.parse_known_args(rest)
    if for_vllm and not for_vllm[0].startswith("-"):
        raise ConfigError(f"{for_vllm[0]!r} is not a flag; the model goes first: {PROG} MODEL [options]")
    line = CommandLine(
        frontend=_of(FrontendOptions, given, without=("system_port",)),
        gateway=_of(GatewaySettings, given, without=()),
        worker=vars(for_workers),
        args=tuple(for_vllm),
        workers=options.workers,
        prefill=options.prefill,
        decode=options.decode,
        encode=options.encode,
    )
    described = from_file(options.config) if options.config else Topology()
    refuse_demo_beside(described, options)
    return options, topology.override(described, line)


def given_flags(argv: Sequence[str]) -> dict[str, object]:
    """Return the options of serve, frontend, gateway and console that the command line has."""
    return vars(parser().parse_known_args(with_model_flag(argv))[0])


def refuse_demo_beside(described: Topology, options: ServeOptions) -> None:
    if options.demo is not None and (described.model is not None or described.workers != Topology().workers):
        raise ConfigError(
            f"--demo {options.demo} cannot be combined with the models and workers of {options.config}; "
            "give one of them"
        )


def serve_options(given: Mapping[str, object], environment: Mapping[str, str]) -> ServeOptions:
    """Return serve's own options; with a file, the environment does not set how many workers there are."""
    options = build.from_values(ServeOptions, given, environment)
    if not options.config:
        return options
    flags = build.from_values(ServeOptions, given, {})
    return dataclasses.replace(
        options, workers=flags.workers, prefill=flags.prefill, decode=flags.decode, encode=flags.encode
    )


def with_model_flag(argv: Sequence[str]) -> list[str]:
    """Replace MODEL as the first word, or after --omni, by --model MODEL."""
    before = 1 if list(argv[:1]) == ["--omni"] else 0
    if len(argv) <= before or argv[before].startswith("-"):
        return list(argv)
    if any(word == "--model" or word.startswith("--model=") for word in argv[before + 1 :]):
        raise ConfigError(f"the model is given twice, {argv[before]} and --model; give one of them")
    return [*argv[:before], "--model", *argv[before:]]


def _of(cls: type, given: Mapping[str, object], without: Sequence[str]) -> dict[str, object]:
    names = {item.name for item in build.declared(cls)} - set(without)
    return {name: value for name, value in given.items() if name in names}


def from_file(path: str) -> Topology:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice: YAML would silently keep only the last value."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"--config {path}:{line}: {key.value!r} is given twice; keep one")
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
            return super().construct_mapping(node, deep)

    try:
        data = yaml.load(Path(path).read_text(), Loader)
    except OSError as exc:
        raise ConfigError(f"--config {path} cannot be read: {exc.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(exc).split())}") from None
    return topology.read(data, path)


# --- before anything starts -----------------------------------------------------------------------------


def prepare(
    wanted: Topology,
    environment: Mapping[str, str],
    folder: RunFolder,
    demo: str | None = None,
    gateway_folder: Path | None = None,
    may_add_gateway: bool = False,
    console: ConsoleSettings | None = None,
    gateway_console: bool = False,
) -> Plan:
    """Return the plan, after every check that does not need a running process."""
    device = "none"
    if demos.needs_vllm(wanted, environment):
        device = machine.device()
        machine.refuse_missing_library()
        versions.refuse_older()
        if said := versions.warning():
            print(said, file=sys.stderr)
    gpus = visible_gpus(environment) if device == "cuda" else []
    if demos.lacks_model(wanted, environment):
        found, left_out = demos.choose(demo or demos.DEFAULT, device)
        wanted = demos.put_in(wanted, found, environment, device, gpus)
        for why in left_out:
            print(why, file=sys.stderr)
    wanted = group_names.named(wanted, environment)  # before a group is split over GPUs
    wanted, sharing = shared_gpus.put_in(wanted, environment, gpus, gpu_bytes() if gpus else None)
    if sharing:
        print(sharing, file=sys.stderr)
    place = None
    if gateway_folder is not None:
        if may_add_gateway and wanted.gateway is None:
            wanted = with_open_gateway(wanted, environment)
        if gateway_console:
            serve_console.refuse_behind_nothing(wanted, console)
        wanted, place = gateway_place(wanted, environment, folder, gateway_folder, gateway_console)
    wanted = with_port(wanted, environment)
    beside = None if console is None else serve_console.place(console, wanted, environment, folder, place)
    plan = plans.make(wanted, environment, folder.discovery, gpus, gateway=place, console=beside)
    if plan.said:
        print(plan.said, file=sys.stderr)
    if gateway_console:
        print(serve_console.BEHIND_GATEWAY.format(plan.url), file=sys.stderr)
    refuse_missing_models(plan)
    refuse_taken_ports(plan)
    ports.leave_out(plan.named_ports)
    planes.refuse_unreachable(planes.servers(plan.front, plan.front.event_plane))
    return plan


def with_gateway(wanted: Topology, options: ServeOptions, environment: Mapping[str, str]) -> Topology:
    """Return the topology with a gateway if one is wanted or needed, and without one otherwise."""
    front = build.from_values(FrontendOptions, wanted.frontend, environment)
    settings = build.from_values(GatewaySettings, wanted.gateway or {}, environment)
    is_public = front.host not in LOOPBACK_HOSTS
    if options.open:
        if settings.api_key:
            raise ConfigError("--open lets everybody in without a key; leave it out, or the gateway's keys")
        opened = {**(wanted.gateway or {}), "open": True} if options.gateway else None
        return dataclasses.replace(wanted, gateway=opened)
    if options.gateway is False:
        if is_public:
            raise ConfigError(
                f"--no-gateway with --host {front.host} lets everybody who can reach it in; leave out "
                "--no-gateway, "
                "or say --open if that is what you want"
            )
        return dataclasses.replace(wanted, gateway=None)
    needed = options.gateway or is_public or settings.api_key or wanted.gateway is not None
    if not needed:
        return wanted
    gateway.refuse_without_keys(settings, environment, front.host if is_public else None)
    return dataclasses.replace(wanted, gateway=wanted.gateway or {})


def with_open_gateway(wanted: Topology, environment: Mapping[str, str]) -> Topology:
    """Return the topology with a gateway without keys if a model has APIs that only a gateway serves."""
    from dynamo_vllm.gateway.envoy import process as envoy  # imports httpx, 0.2 s

    models = gateways.needing(wanted, environment)
    if not models:
        return wanted
    named = ", ".join(models)
    try:
        envoy.find(build.from_values(GatewaySettings, {}, environment).envoy_path)
    except StartError as exc:
        print(
            f"{named}: /v1/score, /v1/audio and the usual shapes of /v1/rerank need the gateway, which is "
            f"not started: {exc}",
            file=sys.stderr,
        )
        return wanted
    print(
        f"a gateway without keys is started for {named}: it serves /v1/rerank, /v1/score and /v1/audio "
        "(--no-gateway leaves it out)",
        file=sys.stderr,
    )
    return dataclasses.replace(wanted, gateway={"open": True})


def gateway_place(
    wanted: Topology,
    environment: Mapping[str, str],
    folder: RunFolder,
    gateway_folder: Path,
    has_console: bool,
) -> tuple[Topology, GatewayPlace | None]:
    """Return the topology with all settings of its gateway, and where that is; None if there is none."""
    if wanted.gateway is None:
        return wanted, None
    if wanted.gateway.get("open"):
        settings = gateways.open_for_all(environment, gateway_folder, folder.path / "files")
        wanted = dataclasses.replace(wanted, gateway={**settings, **wanted.gateway})
    gateway_folder.mkdir(mode=0o700, exist_ok=True)
    socket = str(gateway_folder / "console") if has_console else None
    first, second, third = (ports.reserve_for_life() for _ in range(3))
    return wanted, GatewayPlace(str(gateway_folder), first, second, third, socket)


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, or all that the driver lists."""
    if (named := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in named.split(",") if gpu]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU; None if the driver does not say."""
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = [int(line) for line in listed.stdout.split() if line.isdecimal()]
    return min(found) << 20 if found else None


def with_port(wanted: Topology, environment: Mapping[str, str]) -> Topology:
    """Replace port 0 by a free port, because serve must know it."""
    if build.from_values(FrontendOptions, wanted.frontend, environment).port != 0:
        return wanted
    return dataclasses.replace(wanted, frontend={**wanted.frontend, "port": ports.reserve_for_life()})


def refuse_missing_models(plan: Plan) -> None:
    for model in plan.models:
        if looks_like_a_path(model) and not Path(model).exists():
            raise StartError(f"{model}: no such folder; give a model's folder or its hub id")


def looks_like_a_path(model: str) -> bool:
    """Return whether a model is a path; a hub id has at most one slash and begins with a letter or digit."""
    return model.startswith(("/", ".", "~")) or (model.count("/") > 1 and "://" not in model)


def refuse_taken_ports(plan: Plan) -> None:
    ports.refuse_taken("--port", plan.host, plan.port)
    for worker in plan.workers:
        for flag, port in (("--system-port", worker.port), ("--card-port", worker.card_port)):
            if port is not None:
                ports.refuse_taken(flag, "0.0.0.0", port)


# --- the run --------------------------------------------------------------------------------------------


def supervise(plan: Plan, limits: SupervisorLimits, folder: RunFolder, control: Path) -> int:
    from dynamo_vllm.supervise.process.child import watch_without_threads
    from dynamo_vllm.supervise.screen import Screen
    from dynamo_vllm.supervise.supervisor import Supervisor

    screen = Screen(sys.stdout, sys.stderr)
    screen.say(f"serving {', '.join(dict.fromkeys(plan.models))}; logs in {folder.logs}")

    async def run() -> int:
        return await Supervisor(plan, limits, folder, screen, control).run()

    watch_without_threads()
    return asyncio.run(run())
