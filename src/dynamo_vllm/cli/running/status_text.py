"""Formats what `status` found as tables for a terminal."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli.tables import table
from dynamo_vllm.observe.units import ago, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dynamo_vllm.observe.status_data import Frontend, Instance, ListedModel, SystemStatus, Worker

MODELS = ("MODEL", "READY", "CONTEXT", "REQUESTS", "IN FLIGHT", "ERRORS")
INSTANCES = ("INSTANCE", "ROLE", "ENDPOINT", "REACHED BY", "DEVICE", "KV INDEX")
# Long columns come last, so that all figures fit into 80 characters.
WORKERS = (
    *("#", "INSTANCE", "ROLE", "STATE", "KV USE", "HIT RATE", "RUNNING", "WAITING", "TOK/S"),
    *("MODEL", "ADAPTERS", "LAST ERROR"),
)
TIERS = ("#", "TIER", "SIZE", "USED", "HIT TOKENS", "READ", "WRITTEN")
NOTHING = "-"
MESSAGE_LENGTH = 80
USABLE = "loaded"
"""The state of an adapter that can be used."""


def text(found: SystemStatus) -> str:
    lines = [f"{found.url}  {_state(found.frontend)}", ""]
    if found.frontend_problem is not None:
        lines += [found.frontend_problem, ""]
    if found.frontend is not None and found.frontend.models:
        lines += [table(MODELS, [_model(model) for model in found.frontend.models]), ""]
    if found.workers:
        lines += [f"workers of {found.place}", "", table(WORKERS, list(_workers(found.workers)))]
        if tiers := list(_tiers(found.workers)):
            lines += ["", "KV caches behind those of the engines", "", table(TIERS, tiers)]
    else:
        lines += [*_instances(found.frontend), str(found.workers_problem)]
    return "\n".join(lines)


def _state(frontend: Frontend | None) -> str:
    if frontend is None:
        return "no answer"
    return "ready" if frontend.ready else "not ready: no model can answer"


def _model(model: ListedModel) -> Sequence[object]:
    context = model.context_length or NOTHING
    return model.name, _yes(model.ready), context, model.requests, model.in_flight, model.errors


def _instances(frontend: Frontend | None) -> Iterator[str]:
    """Yield what the frontend knows about workers, for a system whose workers cannot be called."""
    if frontend is None:
        return
    if frontend.instances is None:
        yield "this frontend does not list its instances"
    elif not frontend.instances:
        yield "no worker is registered"
    else:
        yield table(INSTANCES, [_instance(instance) for instance in frontend.instances])
    yield ""


def _instance(i: Instance) -> Sequence[object]:
    return i.id, i.role, i.address, i.transport, i.device, _yes(i.kv_index)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


# --- workers ----------------------------------------------------------------------------------------------


def _workers(workers: Iterable[Worker]) -> Iterator[Sequence[object]]:
    for worker in workers:
        reply = worker.reply
        if reply.get("status") != "success":
            blank = [NOTHING] * (len(WORKERS) - 5)
            state = "no answer" if reply.get("error") in ("unreachable", "no_answer") else "refuses"
            yield worker.number, worker.worker, NOTHING, state, *blank, _cut(reply.get("message"))
            continue
        ranks: list[dict[str, object]] = reply.get("ranks") or []
        yield (
            worker.number,
            worker.worker,
            reply.get("role") or NOTHING,
            reply.get("state") or NOTHING,
            *_figures(ranks),
            ",".join(reply.get("models") or ()) or NOTHING,
            _adapters(reply.get("adapters") or ()),
            _last_error(reply.get("last_error")),
        )
        if len(ranks) > 1:
            for rank in ranks:
                yield "", f"  rank {rank.get('rank')}", "", "", *_figures([rank]), "", "", ""


def _tiers(workers: Iterable[Worker]) -> Iterator[Sequence[object]]:
    for worker in workers:
        for tier in worker.reply.get("tiers") or ():
            total, used, hits = (tier.get(name) for name in ("bytes", "used_bytes", "hit_tokens"))
            yield (
                worker.number,
                f"{tier.get('tier')}, paused" if tier.get("is_paused") else tier.get("tier"),
                size(total or 0),
                NOTHING if used is None or not total else _percent(used / total),
                NOTHING if hits is None else hits,
                _moved(tier, "read"),
                _moved(tier, "written"),
            )


def _moved(tier: Mapping[str, Any], way: str) -> str:
    moved, seconds = tier.get(f"{way}_bytes") or 0, tier.get(f"{way}_seconds") or 0.0
    return f"{size(moved)} in {seconds:.1f} s"


def _figures(ranks: Sequence[Mapping[str, Any]]) -> Sequence[object]:
    """Return KV use, hit rate, running, waiting and tokens per second, over all ranks."""
    if not ranks:
        return [NOTHING] * 5
    usage = fmean(float(rank.get("kv_usage") or 0) for rank in ranks)
    rates = [rank.get("hit_rate") for rank in ranks]
    # The rates of several ranks cannot be averaged without the number of their queries.
    hits = rates[0] if len(rates) == 1 else None
    sums = [sum(int(rank.get(name) or 0) for rank in ranks) for name in ("running", "waiting")]
    speed = sum(float(rank.get("tokens_per_second") or 0) for rank in ranks)
    return _percent(usage), _percent(hits), *sums, f"{speed:.0f}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def _adapters(adapters: Sequence[Mapping[str, object]]) -> str:
    """Return the names of adapters, with the state of each that cannot be used yet."""
    names = (
        str(a.get("name")) if a.get("state") == USABLE else f"{a.get('name')} ({a['state']})"
        for a in adapters
    )
    return ",".join(names) or NOTHING


def _last_error(error: Mapping[str, Any] | None) -> str:
    if not error:
        return NOTHING
    return f"{ago(float(error.get('seconds_ago') or 0))} ago: {_cut(error.get('message'))}"


def _cut(message: object) -> str:
    line = " ".join(str(message).split())
    return line if len(line) <= MESSAGE_LENGTH else line[: MESSAGE_LENGTH - 1] + "…"
