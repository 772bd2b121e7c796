"""Runs `dynamo-vllm check`: shows what a worker would do with its settings; --live tests a running system."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm import ports
from dynamo_vllm.cli import versions
from dynamo_vllm.config import build, checks, model_kind
from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options import FindOptions, WorkerOptions
from dynamo_vllm.config.rules.worker import model_is_named
from dynamo_vllm.config.worker_plan import WorkerPlan
from dynamo_vllm.engine.patches import table
from dynamo_vllm.engine.vllm.compat import versions as compat
from dynamo_vllm.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dynamo_vllm.config.engine_rules import Fired
    from dynamo_vllm.config.nodes import Node

PROG = "dynamo-vllm check"
DESCRIPTION = (
    "Show versions, a worker's resolved configuration, our engine defaults and patches, and its ports.\n"
    "With --live URL: prove that a running system answers, that its KV events arrive and that its tiers\n"
    "of KV caches give back what they got."
)
EPILOG = (
    "Every option of 'dynamo-vllm worker' and every engine flag of vLLM is accepted; nothing is started.\n"
    "With --live, --model NAME says which served model to ask (default: the first). Tiers are proven of the\n"
    "workers that 'dynamo-vllm status' would find, with the same flags."
)
MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of `check`."""

    live: str | None = opt(
        None, "check", "Frontend of a running system to prove.", env="DYN_VLLM_CHECK_LIVE", metavar="URL"
    )
    timeout: float = opt(
        60.0,
        "check",
        "With --live: seconds to wait for one answer.",
        env="DYN_VLLM_CHECK_TIMEOUT",
        metavar="SECONDS",
    )
    strict: bool = opt(
        False, "check", "With --live: what could not be proven counts as failed.", env="DYN_VLLM_CHECK_STRICT"
    )
    engine: bool = opt(
        True,
        "check",
        "Leave out the engine defaults, for which vLLM is imported (about 10 s); the variable takes 0.",
        env="DYN_VLLM_CHECK_ENGINE",
        flags=("--no-engine",),
    )
    json: bool = opt(False, "check", "Print JSON for other programs.", env="DYN_VLLM_CHECK_JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions(FindOptions):
    """The further options of `check --live`: the model, and where its workers are."""

    model: str | None = opt(None, "check", "Served model to ask.", env="DYN_VLLM_CHECK_MODEL", metavar="NAME")


@dataclass(frozen=True, slots=True)
class Setting:
    """An option that differs from its default, and the flag or variable that sets it."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Port:
    use: str
    port: int
    free: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    versions: Mapping[str, str]
    not_proven: Sequence[str]
    """With the installed vLLM."""
    patches: Sequence[Mapping[str, Any]]
    """Our patches of other packages, with their state for the installed versions."""
    facts: Mapping[str, str]
    settings: Sequence[Setting]
    engine_flags: Sequence[str]
    engine_defaults: Sequence[Fired] | None
    """None if they were not computed."""
    ports: Sequence[Port]
    problems: Sequence[str]


def main(argv: Sequence[str]) -> int:
    environment = build.environment()
    options, rest = build.parse(CheckOptions, argv, environment, PROG, DESCRIPTION, EPILOG)
    if options.live is not None:
        return live(options, rest, environment)
    found = look(options, rest, environment)
    print(json.dumps(dataclasses.asdict(found), indent=2, default=str) if options.json else text(found))
    return 2 if found.problems else 0


# --- a running system -------------------------------------------------------------------------------------


def live(options: CheckOptions, rest: Sequence[str], environment: Mapping[str, str]) -> int:
    chosen, unknown = build.parse(LiveOptions, rest, environment, PROG, DESCRIPTION)
    if unknown:
        raise ConfigError(
            f"{unknown[0]} cannot be combined with --live, which takes --model and where the workers are"
        )
    checks.check_find(chosen)
    from dynamo_vllm.cli.running import deployment, tier_proof
    from dynamo_vllm.cli.running.prove import OK, Proof, prove
    from dynamo_vllm.observe.frontend_client import FrontendClient, base

    chosen, _ = deployment.find(chosen, environment, base(str(options.live)))
    steps = []
    with contextlib.closing(FrontendClient(str(options.live), options.timeout)) as client:
        for step in prove(client, chosen.model):
            steps.append(step)
            if not options.json:
                print(step, flush=True)
    if all(step.outcome is not Proof.FAILED for step in steps):
        more = tier_proof.prove(chosen, environment)
        steps += more
        if not options.json:
            print(*more, sep="\n", flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(step) for step in steps], indent=2))
    accepted = {OK, Proof.SKIPPED} if options.strict else {OK, Proof.SKIPPED, Proof.NOT_PROVEN}
    return 0 if all(step.outcome in accepted for step in steps) else 1


# --- a worker that is not started -------------------------------------------------------------------------


def look(options: CheckOptions, argv: Sequence[str], environment: Mapping[str, str]) -> CheckReport:
    """Resolve a worker's settings and collect every problem; nothing is started."""
    given, engine_argv = build.parser(WorkerOptions, PROG, DESCRIPTION).parse_known_args(list(argv))
    named = build.from_values(WorkerOptions, vars(given), environment)
    plan = WorkerPlan.of(named, engine_argv)
    worker = plan.options
    ports = list(ports_of(plan, environment))
    problems = list(refusals(plan))
    problems += [
        f"port {p.port} ({p.use}) is in use; choose another or stop the process that uses it"
        for p in ports
        if not p.free
    ]
    defaults = None
    if options.engine and worker.model and worker.engine == "vllm" and not problems:
        defaults, problem = engine_defaults(plan, environment)
        problems += [problem] if problem else []
    return CheckReport(
        versions=versions.found(),
        not_proven=compat.unproven(),
        patches=[patch.described() for patch in table.PATCHES],
        facts=facts_of(plan),
        settings=list(settings_of(named, vars(given), environment)),
        engine_flags=engine_argv,
        engine_defaults=defaults,
        ports=ports,
        problems=problems,
    )


def settings_of(
    worker: WorkerOptions, given: Mapping[str, object], environment: Mapping[str, str]
) -> Iterator[Setting]:
    """Yield the options that differ from their defaults."""
    values = build.without_secrets(worker)
    for item in build.declared(WorkerOptions):
        if values[item.name] != item.default:
            source = "flag" if item.name in given else item.variable_in(environment) or item.option.env
            yield Setting(item.flags[0], values[item.name], source)


def facts_of(plan: WorkerPlan) -> dict[str, str]:
    """Describe what follows from the options."""
    worker = plan.options
    named = worker.served_model_name or ((worker.model,) if worker.model else ())
    return {
        "model": worker.model or "none given",
        "served as": ", ".join(named) or "-",
        "role": worker.role,
        "nodes": _nodes(plan.node),
        "address": worker.address,
        "discovery": _discovery(worker),
        "planes": f"requests over {worker.request_plane}, events over {worker.event_plane}",
        "bound to": worker.bind_host or "the machine's own address",
        "kv events": _kv_events(plan),
    }


def _discovery(worker: WorkerOptions) -> str:
    folder = worker.discovery_folder
    return worker.discovery_backend if folder is None else f"file, in {folder}"


def _kv_events(plan: WorkerPlan) -> str:
    worker, flags, node = plan.options, plan.flags, plan.node
    if worker.engine == "fake":
        return "none from the fake engine"
    if worker.omni:
        return "none from a pipeline of vLLM-Omni"
    if worker.card.kind != model_kind.GENERATE:
        return f"none from a {worker.card.kind} model"
    if worker.kv_events is False or "no_enable_prefix_caching" in flags:
        return "off"
    if "kv_events_config" in flags:
        return "as --kv-events-config says"
    if worker.kv_event_port is not None:
        return f"from port {worker.kv_event_port} on"
    if node.event_port is not None:
        return f"to ports from {node.event_port} on at {node.leader}"
    return "over a local socket" if node.all_ranks == 1 else f"over {node.ports_in_a_row} free ports in a row"


def _nodes(node: Node) -> str:
    if node.is_headless:
        return f"engines of {node.name} for the worker at {node.leader}:{node.port}; serves no endpoint"
    if node.has_followers:
        return f"leads other nodes at {node.leader}:{node.port}"
    return f"serves {node.name} of {node.all_ranks}" if node.serves_own_ranks else "this one"


def ports_of(plan: WorkerPlan, environment: Mapping[str, str]) -> Iterator[Port]:
    """Yield the ports that the options name; the system picks free ones for the rest."""
    for use, host, port in _named_ports(plan, environment):
        if 0 < port <= MAX_PORT:
            yield Port(use, port, not ports.is_taken(host, port))


def _named_ports(plan: WorkerPlan, environment: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    worker, node = plan.options, plan.node
    anywhere = worker.bind_host or "0.0.0.0"
    yield "health and metrics", worker.system_host or anywhere, worker.system_port or 0
    yield "files of the model card", worker.system_host or anywhere, worker.card_port or 0
    if worker.kv_event_port is not None and worker.kv_events is not False:
        for rank in range(node.first_rank, node.ports_in_a_row):
            yield f"KV events of rank {rank}", "0.0.0.0", worker.kv_event_port + rank
    if node.has_followers:
        yield "other nodes", node.leader, node.link_port
    rpc = environment.get("DYN_TCP_RPC_PORT", "")
    if worker.request_plane == "tcp" and rpc.isdecimal():
        yield "requests, DYN_TCP_RPC_PORT", anywhere, int(rpc)


def refusals(plan: WorkerPlan) -> Iterator[str]:
    """Yield every error of the options; a start would report only the first."""
    for rule in (lambda o, _: checks.check_runtime(o), *checks.WORKER_RULES):
        # Without a model, versions and settings can still be shown.
        if rule is model_is_named:
            continue
        try:
            rule(plan.options, plan.flags)
        except ConfigError as exc:
            yield str(exc)


def engine_defaults(
    plan: WorkerPlan, environment: Mapping[str, str]
) -> tuple[Sequence[Fired] | None, str | None]:
    """Return the defaults that we set instead of vLLM's or vLLM-Omni's, or the error of the flags."""
    from dynamo_vllm.engine import machine
    from dynamo_vllm.engine.omni import arguments as omni_arguments
    from dynamo_vllm.engine.process import environment as vllm_environment
    from dynamo_vllm.engine.vllm import arguments as vllm_arguments
    from dynamo_vllm.serving.factories import engine_settings

    # A worker creates a new folder at every start.
    scratch = f"{tempfile.gettempdir()}/dynamo-vllm-…"
    print("importing vLLM, about 10 s (--no-engine leaves it out) …", file=sys.stderr, flush=True)
    try:
        # vLLM logs to stdout, which must hold only the report.
        with contextlib.redirect_stdout(sys.stderr):
            machine.refuse_missing_library()
            compat.refuse_older()
            settings = engine_settings(plan, environment, scratch)
            if plan.options.omni:
                return omni_arguments.preview(settings), None
            vllm_environment.set_environment(settings)
            fired = vllm_arguments.resolve(settings).fired
    except (ConfigError, StartError) as exc:
        return None, str(exc)
    return fired, None


# --- text -------------------------------------------------------------------------------------------------


def text(found: CheckReport) -> str:
    defaults = found.engine_defaults or ()
    parts = [
        _block("versions", found.versions.items()),
        f"not proven with this vLLM\n  {', '.join(found.not_proven)}" if found.not_proven else "",
        _block("worker", found.facts.items()),
        _block("set", [(s.name, f"{_shown(s.value)}  ({s.source})") for s in found.settings]),
        _block("for vLLM", [("flags", " ".join(found.engine_flags))] if found.engine_flags else []),
        _block(
            "engine defaults we set", [(d.argument, f"{_shown(d.value)}  ({d.reason})") for d in defaults]
        ),
        _block("patches", [(p["name"], f"{p['state']}  ({p['defect']})") for p in found.patches]),
        _block("ports", [(str(p.port), f"{p.use}: {'free' if p.free else 'TAKEN'}") for p in found.ports]),
        "\n  ".join(("problems", *found.problems)) if found.problems else "no problem found",
    ]
    return "\n\n".join(part for part in parts if part)


def _block(title: str, rows: Any) -> str:
    lines = [(str(name), str(value)) for name, value in rows]
    if not lines:
        return ""
    width = max(len(name) for name, _ in lines)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines)])


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return " ".join(value) if isinstance(value, tuple) else str(value)
