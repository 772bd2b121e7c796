"""Runs `dynamo-vllm status`: shows the models and workers of a running system."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli.process import ask_quietly
from dynamo_vllm.cli.running import deployment, status_text, worker_names
from dynamo_vllm.cli.running.frontend_client import (
    DEFAULT_URL,
    FrontendClient,
    MetricSample,
    Unanswered,
    base,
    ready_models,
    with_url_flag,
)
from dynamo_vllm.cli.running.status_data import Frontend, Instance, ListedModel, SystemStatus, Worker
from dynamo_vllm.cli.running.watch import WatchScreen, watch
from dynamo_vllm.config import build, checks, runtime_env
from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options import FindOptions
from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.serving.admin import client as admin_client
from dynamo_vllm.serving.admin import endpoint as admin_endpoint
from dynamo_vllm.serving.plane import kv_compatibility
from dynamo_vllm.serving.tokens import address as tokens_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PROG = "dynamo-vllm status"
DESCRIPTION = (
    "Show models, workers and figures of a running system. The URL may also be the first argument.\n"
    "Models and requests are the frontend's; workers are found in discovery and report their own state."
)
# Each worker with a KV index answers the router's queries on an endpoint of this name.
_KV_INDEX = "worker_kv_query"
_HELPERS = {card.component: role for role, card in CARDS.items() if card.helps_others}
_ANSWERS = "backend"
"""The default component of the workers that answer clients."""
_AMONG_THEMSELVES = (kv_compatibility.ENDPOINT, admin_endpoint.ENDPOINT, tokens_address.ENDPOINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions(FindOptions):
    """The options of `status`."""

    url: str | None = opt(
        None,
        "status",
        f"URL of the frontend (default: that of the serve on this machine, else {DEFAULT_URL}).",
        env="DYN_VLLM_URL",
        metavar="URL",
    )
    timeout: float = opt(
        10.0, "status", "Seconds to wait for an answer.", env="DYN_VLLM_STATUS_TIMEOUT", metavar="SECONDS"
    )
    watch: float | None = opt(
        None,
        "status",
        "Repeat at this interval, 2 by default, until Ctrl-C; with --json, print one line each time.",
        env="DYN_VLLM_STATUS_WATCH",
        metavar="SECONDS",
        bare_value="2",
    )
    json: bool = opt(False, "status", "Print JSON for other programs.", env="DYN_VLLM_STATUS_JSON")


def main(argv: Sequence[str]) -> int:
    environment = build.environment()
    options, rest = understand(argv, environment)
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of status; see '{PROG} --help'")
    checks.check_find(options)
    refuse_bad_times(options)
    named = None if options.url is None else base(options.url)
    options, folder = deployment.find(options, environment, named)
    url = named or (folder and folder.url) or DEFAULT_URL
    with closing(FrontendClient(url, options.timeout)) as client:
        if has_discovery(options):
            runtime_env.export_caller(options, environment)
            return ask_quietly(run(options, client), environment)
        return asyncio.run(run(options, client))


def understand(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[StatusOptions, list[str]]:
    parser = build.parser(StatusOptions, PROG, DESCRIPTION, own_first=True)
    given, rest = parser.parse_known_args(with_url_flag(argv))
    return build.from_values(StatusOptions, vars(given), environment), rest


def refuse_bad_times(options: StatusOptions) -> None:
    for flag, seconds in (("--timeout", options.timeout), ("--watch", options.watch)):
        if seconds is not None and seconds <= 0:
            raise ConfigError(f"{flag} {seconds:g} must be above 0")


def has_discovery(options: StatusOptions) -> bool:
    """Return whether workers can be found: without the folder there are none, and no runtime is needed."""
    folder = options.discovery_folder
    return folder is None or folder.is_dir() or options.watch is not None


async def run(options: StatusOptions, client: FrontendClient) -> int:
    async with AsyncExitStack() as stack:
        workers, problem = None, admin_client.no_workers_message(options)
        if has_discovery(options):
            try:
                workers = await stack.enter_async_context(admin_client.Workers(options, may_be_none=True))
                await workers.seen()
            except admin_client.NoWorkers as exc:
                problem = str(exc)
        if options.watch is not None:
            return await keep_showing(options, client, workers, problem)
        found = await ask(options, client, workers, problem)
    if found.frontend is None and not found.workers:
        raise Unanswered(f"{found.frontend_problem}\n{found.workers_problem}")
    print(json.dumps(found.builtins(), indent=2) if options.json else status_text.text(found))
    return 0


async def keep_showing(
    options: StatusOptions, client: FrontendClient, workers: admin_client.Workers | None, problem: str
) -> int:
    async def look() -> str:
        found = await ask(options, client, workers, problem)
        return json.dumps(found.builtins()) if options.json else status_text.text(found)

    with WatchScreen(sys.stdout, is_live=sys.stdout.isatty() and not options.json) as screen:
        try:
            await watch(look, screen.show, options.watch or 0)
        except (asyncio.CancelledError, BrokenPipeError):  # Ctrl-C, or the reader has gone
            return 0
    return 0


async def ask(
    options: StatusOptions, client: FrontendClient, workers: admin_client.Workers | None, problem: str
) -> SystemStatus:
    """Query the frontend and the workers at the same time; either may be missing."""
    front, replies = await asyncio.gather(
        asyncio.to_thread(ask_frontend, client), ask_workers(workers, options.timeout)
    )
    return SystemStatus(
        url=client.url,
        place=f"namespace {options.namespace} in {admin_client.place(options)}",
        frontend=None if isinstance(front, Unanswered) else front,
        frontend_problem=str(front) if isinstance(front, Unanswered) else None,
        workers=replies,
        workers_problem=None if replies else problem,
    )


async def ask_workers(workers: admin_client.Workers | None, seconds: float) -> list[Worker]:
    if workers is None:
        return []
    replies = await workers.ask_all("status", min(seconds, admin_client.STATUS_SECONDS))
    names = worker_names.short(list(replies))
    return [Worker(n, names[i], i, reply) for n, (i, reply) in enumerate(replies.items(), 1)]


def ask_frontend(client: FrontendClient) -> Frontend | Unanswered:
    try:
        health = client.get("/health")
        ready, listed = ready_models(health), client.models()
        if ready is None and health.status_code != 200:
            raise Unanswered(f"{client.url}/health is not that of a frontend; is the URL right?")
        if ready is None:  # upstream's frontend does not say which models can answer
            ready = [str(entry["id"]) for entry in listed]
        samples = client.samples()
        # The frontend does not know these; a gateway lists them because a worker told it of them.
        others = [str(entry["id"]) for entry in listed if entry.get("kind") == "transcription"]
        models = [_model(entry, [*ready, *others], samples) for entry in listed]
        return Frontend(bool(ready or others), models, _instances(client))
    except Unanswered as exc:
        return exc


def _model(entry: dict[str, Any], ready: Iterable[str], samples: Sequence[MetricSample]) -> ListedModel:
    name = str(entry["id"])
    ends = Counter[str]()
    in_flight = 0
    for sample in samples:
        if sample.labels.get("model") != name:
            continue
        # The prefix of these names is a setting of the frontend, but their endings are fixed.
        if sample.name.endswith("_requests_total") and "status" in sample.labels:
            ends[sample.labels["status"]] += int(sample.value)
        elif sample.name.endswith("_inflight_requests"):
            in_flight += int(sample.value)
    return ListedModel(
        name, name in ready, entry.get("context_window"), ends.total(), in_flight, ends["error"]
    )


def _instances(client: FrontendClient) -> list[Instance] | None:
    response = client.get("/instances")
    if response.status_code != 200:
        return None
    listed: list[dict[str, Any]] = response.json().get("instances", [])
    indexed = {entry["instance_id"] for entry in listed if entry["endpoint"].startswith(_KV_INDEX)}
    roles = _roles({_kind(entry["component"]) for entry in listed})
    return [
        Instance(
            entry["instance_id"],
            roles.get(_kind(entry["component"]), "-"),
            f"{entry['namespace']}.{entry['component']}.{entry['endpoint']}",
            _transport(entry.get("transport")),
            entry.get("device_type") or "-",
            entry["instance_id"] in indexed,
        )
        for entry in sorted(listed, key=lambda e: (e["component"], e["endpoint"], e["instance_id"]))
        if not entry["endpoint"].startswith(_KV_INDEX)
        and entry["endpoint"] not in admin_client.SECONDS  # a verb
        and f"{entry['component']}.{entry['endpoint']}" not in _AMONG_THEMSELVES
    ]


def _roles(components: Iterable[str]) -> dict[str, str]:
    """Return the role of each component; decode workers without prefill workers do everything."""
    is_split = any(card.gives_kv and card.component in components for card in CARDS.values())
    answer = (role for role, card in CARDS.items() if not card.helps_others and card.takes_kv == is_split)
    return {**_HELPERS, _ANSWERS: next(answer)}


def _kind(component: str) -> str:
    """Return backend for backend-2, the component of a second model."""
    head, _, number = component.rpartition("-")
    return head if number.isdecimal() else component


def _transport(transport: object) -> str:
    """Format {"tcp": "host:port/path"} as `tcp host:port`."""
    if isinstance(transport, dict) and transport:
        kind, where = next(iter(transport.items()))
        return f"{kind} {str(where).split('/')[0]}"
    return str(transport)
