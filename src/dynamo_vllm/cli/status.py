"""`dynamo-vllm status`: what a running system serves."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli.client import DEFAULT_URL, Client, Sample, Unanswered, table, with_url_flag
from dynamo_vllm.config import build
from dynamo_vllm.config.build import opt
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.serving import peers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROG = "dynamo-vllm status"
DESCRIPTION = "Show models, workers and figures of a running system. The URL may also be the first argument."
# Each worker that keeps a KV index answers the router's questions about it on an endpoint of this name.
_KV_INDEX = "worker_kv_query"
_ROLES = {"prefill": "prefill", "encoder": "encode"}
_ANSWERS = "backend"
"""Component of the workers that answer clients, unless the user named one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions:
    """Which system to ask, and how to print what it says."""

    url: str = opt(DEFAULT_URL, "status", "Frontend to ask.", env="DYN_VLLM_URL", metavar="URL")
    timeout: float = opt(
        10.0, "status", "Seconds to wait for an answer.", env="DYN_VLLM_STATUS_TIMEOUT", metavar="SECONDS"
    )
    json: bool = opt(False, "status", "Print JSON for other programs.", env="DYN_VLLM_STATUS_JSON")


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    ready: bool
    context_length: int | None
    requests: int
    in_flight: int
    errors: int


@dataclass(frozen=True, slots=True)
class Instance:
    id: int
    role: str
    """- where the component's name does not tell."""
    address: str
    transport: str
    device: str
    kv_index: bool


@dataclass(frozen=True, slots=True)
class Status:
    url: str
    ready: bool
    models: list[Model]
    instances: list[Instance] | None
    """None when the frontend does not tell."""


def main(argv: Sequence[str]) -> int:
    options, rest = build.parse(StatusOptions, with_url_flag(argv), build.environment(), PROG, DESCRIPTION)
    if rest:
        raise ConfigError(f"{rest[0]} is no option of status; see '{PROG} --help'")
    with closing(Client(options.url, options.timeout)) as client:
        found = ask(client)
    print(json.dumps(asdict(found), indent=2) if options.json else text(found))
    return 0


def ask(client: Client) -> Status:
    ready = ready_models(client)
    listed = client.models()
    samples = client.samples()
    models = [_model(entry, ready, samples) for entry in listed]
    return Status(client.url, bool(ready), models, _instances(client))


def ready_models(client: Client) -> list[str]:
    """Names of the models that can answer, from our frontend's /health."""
    try:
        body = client.get("/health").json()
        return [str(name) for name in body["models"]]
    except (ValueError, KeyError, TypeError):
        raise Unanswered(f"{client.url}/health is not our frontend's; is this its address?") from None


def _model(entry: dict[str, Any], ready: Iterable[str], samples: Sequence[Sample]) -> Model:
    name = str(entry["id"])
    ends = Counter[str]()
    in_flight = 0
    for sample in samples:
        if sample.labels.get("model") != name:
            continue
        # The prefix of these names is a setting of the frontend, their endings are not.
        if sample.name.endswith("_requests_total") and "status" in sample.labels:
            ends[sample.labels["status"]] += int(sample.value)
        elif sample.name.endswith("_inflight_requests"):
            in_flight += int(sample.value)
    return Model(name, name in ready, entry.get("context_window"), ends.total(), in_flight, ends["error"])


def _instances(client: Client) -> list[Instance] | None:
    response = client.get("/instances")
    if response.status_code != 200:
        return None
    told: list[dict[str, Any]] = response.json().get("instances", [])
    indexed = {entry["instance_id"] for entry in told if entry["endpoint"].startswith(_KV_INDEX)}
    roles = _roles({entry["component"] for entry in told})
    return [
        Instance(
            entry["instance_id"],
            roles.get(entry["component"], "-"),
            f"{entry['namespace']}.{entry['component']}.{entry['endpoint']}",
            _transport(entry.get("transport")),
            entry.get("device_type") or "-",
            entry["instance_id"] in indexed,
        )
        for entry in sorted(told, key=lambda e: (e["component"], e["endpoint"], e["instance_id"]))
        if not entry["endpoint"].startswith(_KV_INDEX)
        and f"{entry['component']}.{entry['endpoint']}" != peers.ENDPOINT  # workers among themselves
    ]


def _roles(components: Iterable[str]) -> dict[str, str]:
    """What the workers of each component do; decode workers without prefill workers do all."""
    return {**_ROLES, _ANSWERS: "decode" if "prefill" in components else "agg"}


def _transport(told: object) -> str:
    """{"tcp": "host:port/path"} → host:port."""
    if isinstance(told, dict) and told:
        kind, where = next(iter(told.items()))
        return f"{kind} {str(where).split('/')[0]}"
    return str(told)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def text(found: Status) -> str:
    lines = [f"{found.url}  {'ready' if found.ready else 'not ready: no model can answer'}", ""]
    if found.models:
        rows = [
            (m.name, _yes(m.ready), m.context_length or "-", m.requests, m.in_flight, m.errors)
            for m in found.models
        ]
        lines += [table(("MODEL", "READY", "CONTEXT", "REQUESTS", "IN FLIGHT", "ERRORS"), rows), ""]
    if found.instances is None:
        lines.append("this frontend does not list its instances")
    elif not found.instances:
        lines.append("no worker is registered")
    else:
        workers = [
            (i.id, i.role, i.address, i.transport, i.device, _yes(i.kv_index)) for i in found.instances
        ]
        lines.append(table(("INSTANCE", "ROLE", "ENDPOINT", "REACHED BY", "DEVICE", "KV INDEX"), workers))
    return "\n".join(lines)
