"""Asks the frontend and the workers of a deployment at once; either may be missing."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.observe import worker_names
from dynamo_vllm.observe.frontend_client import Unanswered, ready_models
from dynamo_vllm.observe.status_data import Frontend, Instance, ListedModel, SystemStatus, Worker
from dynamo_vllm.serving.admin import client as admin_client
from dynamo_vllm.serving.admin import endpoint as admin_endpoint
from dynamo_vllm.serving.plane import kv_compatibility
from dynamo_vllm.serving.tokens import address as tokens_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynamo_vllm.observe.frontend_client import FrontendClient
    from dynamo_vllm.observe.metrics import MetricSample

# Each worker with a KV index answers the router's queries on an endpoint of this name.
_KV_INDEX = "worker_kv_query"
_HELPERS = {card.component: role for role, card in CARDS.items() if card.helps_others}
_ANSWERS = "backend"
"""The default component of the workers that answer clients."""
_AMONG_THEMSELVES = (kv_compatibility.ENDPOINT, admin_endpoint.ENDPOINT, tokens_address.ENDPOINT)


async def ask_all(
    client: FrontendClient,
    workers: admin_client.Workers | None,
    place: str,
    problem: str,
    seconds: float,
) -> SystemStatus:
    """Return what both said; `place` is where workers were searched, `problem` why there are none."""
    front, replies = await asyncio.gather(
        asyncio.to_thread(ask_frontend, client), ask_workers(workers, seconds)
    )
    return SystemStatus(
        url=client.url,
        place=place,
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
