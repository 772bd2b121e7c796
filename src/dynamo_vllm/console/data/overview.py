"""Polls a deployment and makes one picture of it: frontends, workers, what flows between them, problems.

The interval follows what a poll costs, so that the console stays cheap with many workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.console.data import history, models, problems, processes
from dynamo_vllm.observe import worker_names
from dynamo_vllm.observe.status_data import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from dynamo_vllm.console.data.frontends import Frontends, FrontendState
    from dynamo_vllm.console.data.history import History
    from dynamo_vllm.console.live import Hub
    from dynamo_vllm.serving.calls.card import WorkerCard
    from dynamo_vllm.supervise.run_folder import RunFolder

logger = logging.getLogger(__name__)
WATCHED_SECONDS, UNWATCHED_SECONDS = 2.0, 5.0
SHARE_OF_A_CORE = 0.006
MOST_SECONDS = 60.0
SOON_SECONDS = 0.5
"""Until the next poll when somebody looks or something was done."""
STATUS_SECONDS = 4.0
MODELS_SECONDS = 30.0
"""How long the list of models is believed while the names of ready ones stay the same."""
GONE_SECONDS = 120.0
"""How long a worker that left without saying so is a problem."""
MOST_EDGES = 1000
"""More cannot be seen; each of many prefill workers may send to each of many decode workers."""
NO_ANSWER = "no answer"
_LEAVING = ("draining", "stopped")
_CHANGES_ALWAYS = ("uptime_seconds", "last_error")

Overview = dict[str, Any]
Who = TypeVar("Who")
Said = TypeVar("Said")


class Asked(Protocol):
    """The part of the admin client that is used here."""

    @property
    def found(self) -> list[int]: ...

    async def ask_all(self, verb: str, seconds: float | None = None) -> dict[int, dict[str, Any]]: ...


class Described(Protocol):
    """The part of the directory of workers that is used here."""

    async def every(self, names: Any = ()) -> list[WorkerCard]: ...


class _Known(NamedTuple):
    """What was last known of a worker."""

    name: str
    state: str
    process: str | None
    pid: int | None


class Answers(Generic[Who, Said]):
    """Keeps the last answers: who misses one poll is shown as before, as a busy machine loses seconds."""

    def __init__(self) -> None:
        self._last: dict[Who, Said] = {}

    def bridge(self, who: Who, answer: Said, is_good: bool) -> Said:
        """Return the answer, or the one before if only this one is missing."""
        if not is_good:
            return self._last.pop(who, answer)
        self._last[who] = answer
        return answer

    def keep(self, those: Container[Who]) -> None:
        """Forget all others."""
        self._last = {who: said for who, said in self._last.items() if who in those}


class Poller:
    """Asks everybody again and again, and keeps the last picture."""

    def __init__(
        self,
        frontends: Frontends,
        workers: Asked,
        directory: Described,
        past: History,
        hub: Hub,
        no_workers: str,
        folder: RunFolder | None = None,
    ) -> None:
        self._frontends = frontends
        self._workers = workers
        self._directory = directory
        self._past = past
        self._hub = hub
        self._no_workers = no_workers
        self._folder = folder
        self._began = time.time()
        self._soon = asyncio.Event()
        self._last: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._known: dict[int, _Known] = {}
        self._gone: dict[int, tuple[_Known, float]] = {}
        self._requests: dict[int, tuple[float, float]] = {}
        self._frontend_answers: Answers[str, FrontendState] = Answers()
        self._worker_answers: Answers[int, dict[str, Any]] = Answers()
        self._models_at = 0.0
        self._ready: tuple[str, ...] = ()
        self._sent = b""
        self.models: list[dict[str, Any]] = []
        self.overview: Overview = {}
        self.first = asyncio.Event()
        """Set once there is a picture."""
        self.on_idle: Callable[[float], None] = lambda at: None
        """Is called with a time when no frontend had a request."""
        self.unexplained: Callable[[], Sequence[str]] = tuple
        """Returns why requests are not explained."""
        hub.on_watch = self.poll_soon

    def poll_soon(self) -> None:
        """Poll again without waiting: somebody looks, or something was done."""
        self._soon.set()

    @property
    def is_old(self) -> bool:
        """Whether the picture is older than one for a page that somebody looks at."""
        return time.time() - float(self.overview.get("at") or 0) > WATCHED_SECONDS

    def name_of(self, instance: int) -> str:
        """Return the short name of a worker, also of one that has left."""
        known = self._known.get(instance)
        return known.name if known else f"{instance:016x}"[: worker_names.SHORT]

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            before = time.process_time()
            try:
                await self.poll()
            except Exception:  # what goes wrong once must not end the page
                logger.exception("a poll failed")
            wait = pause(time.process_time() - before, self._hub.is_watched)
            try:
                async with asyncio.timeout(wait):
                    await self._soon.wait()
                await asyncio.sleep(SOON_SECONDS)  # several requests to poll soon are one
            except TimeoutError:
                pass
            self._soon.clear()

    async def poll(self) -> None:
        began = time.time()
        asked, told, of_serve = await asyncio.gather(
            self._frontends.ask(),
            self._workers.ask_all("status", STATUS_SECONDS),
            processes.of_serve(self._folder),
        )
        frontends = [self._frontend_answers.bridge(one.name, one, one.problem is None) for one in asked]
        replies = {
            instance: self._worker_answers.bridge(instance, reply, not problems.is_silent(reply))
            for instance, reply in told.items()
        }
        self._worker_answers.keep(replies)
        names = worker_names.short(list(replies))
        workers = [Worker(n, names[i], i, reply) for n, (i, reply) in enumerate(replies.items(), 1)]
        now = time.time()
        if asked and all(one.is_ready and not one.figures.in_flight for one in asked):
            self.on_idle(began)
        await self._look_up_models(frontends, workers, now)
        shown = [self._worker(worker, processes.of_worker(worker.reply, of_serve), now) for worker in workers]
        sample = self._past.add(now, frontends, {one["id"]: one for one in shown})
        figures = history.row(sample)
        self.overview = {
            "at": round(now, 3),
            "processes": of_serve or processes.that_answer(frontends, workers, now, self._began),
            "frontends": [_frontend(one) for one in frontends],
            "workers": shown,
            "edges": edges(frontends, shown),
            "problems": [
                *problems.of_frontends(frontends, processes.drained(of_serve)),
                *problems.of_workers(workers, self._no_workers, processes.drained(of_serve)),
                *problems.of_processes(of_serve or ()),
                *problems.of_gone(self._left(shown, of_serve, now)),
                *problems.of_decisions(self.unexplained() if _are_routed_by_cache(shown) else ()),
            ],
            "totals": {
                "requests_per_second": figures["requests_per_second"],
                "tokens_per_second": figures["output_tokens_per_second"],
                "in_flight": figures["in_flight"],
                "errors_per_second": figures["errors_per_second"],
            },
        }
        self.first.set()
        self._publish(figures)

    def _publish(self, figures: Mapping[str, Any]) -> None:
        if not self._hub.is_watched:
            self._sent = b""
            self._hub.publish("overview", self.overview, keep=1)
            return
        self._hub.publish("sample", figures)
        seen = msgspec.json.encode(without_clocks(self.overview))
        if seen != self._sent:
            self._sent = seen
            self._hub.publish("overview", self.overview, keep=1)

    async def _look_up_models(
        self, frontends: Sequence[FrontendState], workers: Sequence[Worker], now: float
    ) -> None:
        ready = tuple(name for one in frontends for name in one.models)
        if ready == self._ready and now - self._models_at < MODELS_SECONDS:
            return
        listed = await self._frontends.models()
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                cards = await self._directory.every(str(entry["id"]) for entry in listed)
        except TimeoutError:
            cards = []
        self.models = models.described(listed, cards, workers)
        self._ready, self._models_at = ready, now

    def _left(
        self, workers: Sequence[Mapping[str, Any]], of_serve: list[processes.Process] | None, now: float
    ) -> list[str]:
        """Return the names of workers that are gone and did not drain."""
        here = {int(worker["instance"]): worker for worker in workers}
        for instance, known in self._known.items():
            if instance not in here and instance not in self._gone and known.state not in _LEAVING:
                self._gone[instance] = (known, now)
        for instance, worker in here.items():
            before = self._known.get(instance)
            if worker["state"] == NO_ANSWER and before is not None:
                self._known[instance] = before._replace(name=worker["id"])
            else:
                self._known[instance] = _Known(
                    worker["id"], worker["state"], worker["process"], worker["pid"]
                )
        self._gone = {
            instance: (known, at)
            for instance, (known, at) in self._gone.items()
            if instance not in here
            and now - at < GONE_SECONDS
            and not processes.was_stopped(known.process, known.pid, of_serve)
        }
        self._known = {i: known for i, known in self._known.items() if i in here or i in self._gone}
        self._requests = {i: counted for i, counted in self._requests.items() if i in here}
        return [known.name for known, _ in self._gone.values()]

    def process_of(self, word: str) -> str | None:
        """Return the process of `serve` with this name, or that of the worker with this id."""
        if any(one["name"] == word for one in self.overview.get("processes", ())):
            return word
        workers = self.overview.get("workers", ())
        return next((one["process"] for one in workers if word in (one["id"], one["instance"])), None)

    def _worker(self, worker: Worker, process: Mapping[str, Any] | None, now: float) -> dict[str, Any]:
        reply = worker.reply
        if reply.get("status") != "success":
            return {**_SILENT, "id": worker.worker, "instance": str(worker.instance), "state": NO_ANSWER}
        ranks = reply.get("ranks") or []
        rates = [rank.get("hit_rate") for rank in ranks]
        error = reply.get("last_error")
        return {
            "id": worker.worker,
            "instance": str(worker.instance),
            "process": process and process["name"],
            "group": process and process["group"],
            "role": reply.get("role"),
            "state": reply.get("state"),
            "models": reply.get("models") or [],
            "adapters": reply.get("adapters") or [],
            "versions": reply.get("versions") or {},
            "host": reply.get("host"),
            "pid": reply.get("pid"),
            "in_flight": reply.get("in_flight") or 0,
            "running": sum(int(rank.get("running") or 0) for rank in ranks),
            "waiting": sum(int(rank.get("waiting") or 0) for rank in ranks),
            "requests_per_second": self._rate(worker.instance, reply.get("requests"), now),
            "tokens_per_second": _sum(ranks, "tokens_per_second"),
            "prompt_tokens_per_second": _sum(ranks, "prompt_tokens_per_second"),
            "uptime_seconds": reply.get("uptime_seconds"),
            "ranks": ranks,
            "kv_used": sum(float(rank.get("kv_usage") or 0) for rank in ranks) / len(ranks)
            if ranks
            else None,
            # The rates of several ranks cannot be averaged without the number of their queries.
            "hit_rate": rates[0] if len(rates) == 1 else None,
            "tiers": [_tier(tier) for tier in reply.get("tiers") or ()],
            "last_error": error and {"message": error.get("message"), "at": _past(now, error)},
        }

    def _rate(self, instance: int, requests: float | None, now: float) -> float | None:
        """Return requests per second since the last poll; None at the first."""
        before = self._requests.get(instance)
        if requests is None:
            return None
        self._requests[instance] = (now, requests)
        if before is None or requests < before[1] or now <= before[0]:
            return None
        return round((requests - before[1]) / (now - before[0]), 2)


_SILENT: dict[str, Any] = {
    **dict.fromkeys(
        ("process", "group", "role", "host", "pid", "uptime_seconds", "kv_used", "hit_rate", "last_error")
    ),
    **{"models": [], "adapters": [], "versions": {}, "ranks": [], "tiers": []},
    **{"in_flight": 0, "running": 0, "waiting": 0},
    **dict.fromkeys(("requests_per_second", "tokens_per_second", "prompt_tokens_per_second")),
}


def _sum(ranks: Sequence[Mapping[str, Any]], name: str) -> float:
    return round(sum(float(rank.get(name) or 0) for rank in ranks), 2)


def _are_routed_by_cache(workers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether there is a choice to explain; pooling workers, for example, have no caches."""
    cards = (CARDS.get(str(worker["role"])) for worker in workers)
    return any(card is not None and card.publishes_kv_events for card in cards)


def pause(cpu_seconds: float, is_watched: bool) -> float:
    """Return how long to wait after a poll that took so much CPU."""
    least = WATCHED_SECONDS if is_watched else UNWATCHED_SECONDS
    return min(MOST_SECONDS, max(least, cpu_seconds / SHARE_OF_A_CORE))


def edges(frontends: Sequence[FrontendState], workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return who sends to whom: requests from frontends, KV caches from prefill to decode workers of the same
    models, encoded media from encode workers.
    """
    found = []
    known = [(worker, CARDS.get(str(worker["role"]))) for worker in workers if worker["role"]]
    share = 1 / max(1, len(frontends))
    for worker, card in known:
        if card is not None and card.encodes_media:
            continue
        found += [_edge(one.name, worker, "requests", worker, share) for one in frontends]
    givers = [(one, card) for one, card in known if card and (card.gives_kv or card.encodes_media)]
    for giver, card in givers:
        takers = [
            (taker, kind)
            for taker, other in known
            if taker is not giver
            and _share_a_model(giver, taker)
            and (kind := _flow(card, other)) is not None
        ]
        shares = Counter(kind for _, kind in takers)
        for taker, kind in takers[: max(0, MOST_EDGES - len(found))]:
            found.append(_edge(giver["id"], taker, kind, giver, 1 / shares[kind]))
    return found


def _flow(giver: Any, taker: Any) -> str | None:
    """Return what a worker of one role sends to a worker of another."""
    if taker is None:
        return None
    if giver.gives_kv and taker.takes_kv:
        return "kv"
    return "encoded" if giver.encodes_media and not (taker.encodes_media or taker.takes_kv) else None


def _share_a_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(set(one["models"][:1]) & set(other["models"]))


def _edge(
    source: str, target: Mapping[str, Any], kind: str, measured: Mapping[str, Any], share: float
) -> dict[str, Any]:
    """Return an edge; of several possible ends each gets the same share of what was measured.

    The tokens are those generated, at prefill workers and from them those of prompts.
    """
    card = CARDS.get(str(measured["role"]))
    is_prefill = card is not None and card.gives_kv
    requests = measured["requests_per_second"]
    tokens = measured["prompt_tokens_per_second" if is_prefill else "tokens_per_second"]
    return {
        "from": source,
        "to": target["id"],
        "kind": kind,
        "requests_per_second": None if requests is None else round(requests * share, 2),
        "tokens_per_second": None if tokens is None or kind == "encoded" else round(tokens * share, 2),
    }


def _frontend(one: FrontendState) -> dict[str, Any]:
    return {
        "name": one.name,
        "url": one.url,
        "ready": one.is_ready,
        "in_flight": one.figures.in_flight,
        "requests_total": one.figures.requests,
        "errors_total": one.figures.errors,
    }


def _tier(tier: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in tier.items() if name != "bytes"}
    return {**rest, "size_bytes": tier.get("bytes")}


def _past(now: float, error: Mapping[str, Any]) -> float:
    return round(now - float(error.get("seconds_ago") or 0))


def without_clocks(overview: Overview) -> Overview:
    """Return it without what changes all the time by itself."""
    workers = [
        {name: value for name, value in worker.items() if name not in _CHANGES_ALWAYS}
        for worker in overview["workers"]
    ]
    # A time that is computed from a worker's own is a slightly other one each time.
    running = [{**process, "since": None} for process in overview["processes"]]
    return {**overview, "at": 0, "workers": workers, "processes": running}
