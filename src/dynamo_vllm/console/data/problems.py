"""Names what is wrong with a deployment, why, and what to do about it. Pure: it is given what was found."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from dynamo_vllm.observe.units import ago

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynamo_vllm.console.data.frontends import FrontendState
    from dynamo_vllm.observe.status_data import Worker

    Problem = dict[str, Any]

ERROR, WARNING = "error", "warning"
RECENT_SECONDS = 600.0
FULL = 0.95
_RESTS = {
    "asleep": ("its engine's memory is freed", "wake it"),
    "falling asleep": ("an operator sent it to sleep", "wake it when it sleeps"),
    "paused": ("an operator paused it", "resume it"),
    "pausing": ("an operator paused it", "resume it when it stands still"),
}


def problem(
    what: str, why: str, fix: str | None, worker: str | None = None, severity: str = WARNING
) -> Problem:
    return {"what": what, "why": why, "fix": fix, "worker": worker, "severity": severity}


def of_frontends(frontends: Sequence[FrontendState], drained: Sequence[str] = ()) -> list[Problem]:
    """Return the problems of the frontends; `drained` are processes that an operator stopped."""
    found = []
    for one in frontends:
        if one.problem is not None:
            fix = "see its log; serve starts it again if it ended"
            found.append(problem(f"{one.name} does not answer", one.problem, fix, severity=ERROR))
        elif not one.is_ready:
            why, fix, severity = (
                _without_drained(drained)
                if drained
                else ("no worker of a model is ready", "wait for workers to start, or see their logs", ERROR)
            )
            found.append(problem(f"{one.name} has no model that can answer", why, fix, severity=severity))
    return found


def _without_drained(drained: Sequence[str]) -> tuple[str, str, str]:
    """Return why there is nobody, what to do, and how bad it is."""
    why = f"an operator drained {', '.join(drained)}"
    return why, f"start it again: restart {drained[0]}", WARNING


def of_workers(workers: Sequence[Worker], none: str | None, drained: Sequence[str] = ()) -> list[Problem]:
    """Return the problems of the workers that discovery lists; `none` says why it lists none."""
    if not workers and drained:
        why, fix, severity = _without_drained(drained)
        return [problem("there are no workers", why, fix, severity=severity)]
    if not workers:
        fix = "start one, or see the logs"
        return [problem("there are no workers", none or "discovery lists none", fix, severity=ERROR)]
    found: list[Problem] = []
    for worker in workers:
        found += _of_one(worker)
    versions = Counter(_versions(worker.reply) for worker in workers if worker.reply.get("versions"))
    if len(versions) > 1:
        why = "; ".join(f"{count} with {text}" for text, count in versions.most_common(3))
        fix = "restart the older ones, unless this is an upgrade in progress"
        found.append(problem("workers have different versions", why, fix))
    return found


def _versions(reply: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(reply["versions"].items()))


def is_silent(reply: Mapping[str, Any]) -> bool:
    return reply.get("status") != "success" and reply.get("error") in ("unreachable", "no_answer")


def _of_one(worker: Worker) -> Iterable[Problem]:
    reply, name = worker.reply, worker.worker
    if reply.get("status") != "success":
        silent = is_silent(reply)
        what = f"worker {name} {'does not answer' if silent else 'refuses'}"
        fix = (
            "see its log; serve starts it again if it ended" if silent else "give the workers' --admin-token"
        )
        yield problem(what, str(reply.get("message")), fix, name, ERROR)
        return
    state = str(reply.get("state"))
    if state == "unwell":
        why = "its engine does not answer; it gets no requests until it does"
        fix = "see its log; serve replaces it if this goes on"
        yield problem(f"worker {name} is unwell", why, fix, name, ERROR)
    elif state in _RESTS:
        yield problem(f"worker {name} is {state}", *_RESTS[state], name)
    for adapter in reply.get("adapters") or ():
        if adapter.get("state") == "failed":
            what = f"adapter {adapter.get('name')} failed on worker {name}"
            yield problem(what, "it could not be loaded", "see the worker's log, then load it again", name)
    ranks = reply.get("ranks") or ()
    if any((rank.get("kv_usage") or 0) > FULL and rank.get("waiting") for rank in ranks):
        why = "its KV cache is full and requests wait"
        fix = "add workers, or give its engine more memory"
        yield problem(f"worker {name} is full", why, fix, name)
    if any(tier.get("is_paused") for tier in reply.get("tiers") or ()):
        why = "it has failed or is full; prompts that it had are computed"
        yield problem(
            f"the disk with KV caches of worker {name} is paused", why, "see the worker's log", name
        )
    error = reply.get("last_error") or {}
    seconds = float(error.get("seconds_ago") or 0)
    if error and seconds < RECENT_SECONDS:
        why = f"{ago(seconds)} ago: {error.get('message')}"
        yield problem(f"a request failed on worker {name}", why, "see its log", name)


def of_processes(processes: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Return a problem for each process that ended and waits to be started again."""
    found = []
    for one in processes:
        last = one.get("last_exit")
        if last is not None and one["state"] == "waiting":
            fix = f"see {one['log']}; serve starts it again"
            found.append(problem(f"{one['name']} does not run", f"it {last['reason']}", fix, severity=ERROR))
    return found


def of_gone(names: Iterable[str]) -> list[Problem]:
    """Return a problem for each worker that left without saying so."""
    why = "it left without finishing its requests: its process ended, or it lost its connection"
    fix = "see its log; serve starts it again"
    return [problem(f"worker {name} is gone", why, fix, name, ERROR) for name in names]


def of_decisions(reasons: Iterable[str]) -> list[Problem]:
    """Return a problem for each reason why requests are not explained; its fix follows a semicolon."""
    found = []
    for reason in reasons:
        why, _, fix = reason.partition("; ")
        found.append(problem("requests are not explained in full", why, fix or None))
    return found
