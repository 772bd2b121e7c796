"""Proof that a running system works: it is ready, it answers, its KV events arrive and its cache is used."""

from __future__ import annotations

import contextlib
import enum
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli.running.frontend_client import FrontendClient, Unanswered, reason
from dynamo_vllm.supervise.probe import smallest_media_requests, went_over_two

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Events need some milliseconds from the engine to the router.
EVENT_SECONDS = 10.0
PAUSE_SECONDS = 0.1
# Several blocks of any size in use, and few enough tokens for a small context even at one token per letter.
WORDS = 120
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
# The frontend counts the batches of KV events its router took over ZMQ; one that predicts has no such series.
_EVENT_BATCHES = "_router_kv_zmq_ingress_batches_total"
# And every event it took, over NATS too; a router that predicts counts what it predicts here.
_EVENTS = "_kv_cache_events_applied_total"  # without its end on the page; the parser adds it
SETTLE_SECONDS = 0.5


class Proof(enum.StrEnum):
    OK = "ok"
    FAILED = "FAILED"
    NOT_PROVEN = "not proven"


OK, FAILED, NOT_PROVEN = Proof.OK, Proof.FAILED, Proof.NOT_PROVEN


@dataclass(frozen=True, slots=True)
class ProofStep:
    """One thing that was tried."""

    name: str
    outcome: Proof
    figure: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{self.outcome:<10}  {self.name:<12}  {self.figure}"
        return f"{line}\n{'':<12}{self.hint}" if self.hint else line


def prove(client: FrontendClient, wanted: str | None) -> Iterator[ProofStep]:
    """The steps in order; the first that failed for good ends the proof."""
    try:
        yield health(client)
        listing, model = listed(client, wanted)
        yield listing
        if model is None:
            return
        path, answering = answer(client, model["id"])
        yield answering
        if path is not None:
            yield from cache(client, path, model)
    except Unanswered as exc:
        yield ProofStep("connection", FAILED, str(exc))


def health(client: FrontendClient) -> ProofStep:
    response = client.get("/health")
    try:
        body = response.json()
    except ValueError:
        return ProofStep("health", FAILED, reason(response), "is this the address of a frontend?")
    models = body.get("models", []) if isinstance(body, dict) else []
    if response.status_code == 200 and models:
        return ProofStep("health", OK, f"ready with {', '.join(models)}")
    return ProofStep(
        "health",
        FAILED,
        f"HTTP {response.status_code}, no model can answer",
        "wait for the worker's 'ready' line; same --namespace and discovery on both sides?",
    )


def listed(client: FrontendClient, wanted: str | None) -> tuple[ProofStep, dict[str, Any] | None]:
    """The model that the other steps ask."""
    served = client.models()
    names = [str(model["id"]) for model in served]
    found = next((model for model in served if wanted in (None, model["id"])), None)
    if found is None:
        hint = f"served are: {', '.join(names)}" if names else "no worker has registered a model"
        return ProofStep("model", FAILED, f"{wanted or 'any model'} is not listed by /v1/models", hint), None
    return ProofStep(
        "model", OK, f"{found['id']}, context of {found.get('context_window', '?')} tokens"
    ), found


def answer(client: FrontendClient, model: str) -> tuple[str | None, ProofStep]:
    """The path that answers: chat, or completions for a model without a chat template."""
    began = time.monotonic()
    complaints = []
    # First: in a chat a model that draws would take all its steps.
    for path, smallest in smallest_media_requests(model).values():
        with contextlib.suppress(Unanswered):
            if client.ask(path, smallest).get("data"):
                return None, drawing(path, began)
    for path in ("/v1/chat/completions", "/v1/completions"):
        try:
            body = client.ask(path, {**said(path, "Say hello."), "model": model, "max_tokens": 8})
        except Unanswered as exc:
            complaints.append(f"{path}: {exc}")
            continue
        tokens = (body.get("usage") or {}).get("completion_tokens", 0)
        figure = f"{tokens} tokens from {path} in {1000 * (time.monotonic() - began):.0f} ms"
        drawn = isinstance(((body.get("choices") or [{}])[0].get("message") or {}).get("content"), list)
        if drawn:
            return None, drawing(path, began)
        if tokens:
            return path, ProofStep("answer", OK, figure)
        complaints.append(f"{path}: an empty answer")
    return None, ProofStep("answer", FAILED, "; ".join(complaints), "the worker's log says why")


def drawing(path: str, began: float) -> ProofStep:
    return ProofStep("answer", OK, f"a picture from {path} in {1000 * (time.monotonic() - began):.0f} ms")


def said(path: str, text: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def unique_prompt(context_length: int | None) -> str:
    """Random words, so that no cache knows them yet; at most one token per letter."""
    words = min(WORDS, (context_length or 4096) // 8)
    return " ".join("".join(random.choices(_ALPHABET, k=5)) for _ in range(words))


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What one answer says about caches."""

    hit_rate: float | None
    """Share of the prompt the router expected in the worker's cache; None when it does not look."""
    cached: int
    prompt: int
    handed_over: bool = False
    """A prefill worker computed the prompt for the decode worker, where all of it counts as cached."""


def serve_once(client: FrontendClient, path: str, model: str, prompt: str) -> CacheUse:
    extra = {"extra_fields": ["worker_id", "timing"]}
    body = client.ask(path, {**said(path, prompt), "model": model, "max_tokens": 1, "nvext": extra})
    timing = (body.get("nvext") or {}).get("timing") or {}
    usage = body.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return CacheUse(timing.get("kv_hit_rate"), cached, usage.get("prompt_tokens") or 0, went_over_two(body))


def cache(client: FrontendClient, path: str, model: dict[str, Any]) -> Iterator[ProofStep]:
    """A prompt nobody sent before, then again until the router knows it and the cache served it."""
    prompt = unique_prompt(model.get("context_window"))

    def repeat(ending: str = "") -> CacheUse:
        return serve_once(client, path, model["id"], prompt + ending)

    before = Counted.now(client)
    first = repeat()
    began = time.monotonic()
    again, tries = first, 0
    while time.monotonic() - began < EVENT_SECONDS:
        again, tries = repeat(), tries + 1
        # More than at first: a chat template's beginning is in the cache of every system in use.
        knows = again.hit_rate is None or again.hit_rate > (first.hit_rate or 0)
        if knows and (again.cached > first.cached or first.handed_over):
            break
        time.sleep(PAUSE_SECONDS)
    seconds = time.monotonic() - began
    yield kv_event(client, first, again, before, f"tries: {tries} in {seconds:.2f} s", repeat)
    yield hand_over(first) if first.handed_over else prefix_cache(first, again)


@dataclass(frozen=True, slots=True)
class Counted:
    """What the frontend has counted of KV events so far."""

    batches: float | None
    """Over ZMQ; None where none of its routers listens there."""
    stored: float
    """Told or predicted, of new blocks."""

    @classmethod
    def now(cls, client: FrontendClient) -> Counted:
        samples = client.samples()
        batches = [sample.value for sample in samples if sample.name.endswith(_EVENT_BATCHES)]
        wanted = {"event_type": "stored", "status": "ok"}.items()
        stored = [s.value for s in samples if s.name.endswith(_EVENTS) and wanted <= s.labels.items()]
        return cls(sum(batches) if batches else None, sum(stored))

    def since(self, before: Counted) -> str:
        """Empty where nothing came."""
        if self.batches is not None and before.batches is not None:
            return f"event batches: {self.batches - before.batches:.0f}"
        return f"events: {self.stored - before.stored:.0f}" if self.stored > before.stored else ""


def predicts(client: FrontendClient, repeat: Callable[[str], CacheUse]) -> bool:
    """Whether the router counts every request: a worker tells of new blocks only.

    Two endings: where a prompt fills its last block, vLLM computes that one again and tells of it.
    """
    for ending in ("", " a", "", " a"):
        before = Counted.now(client)
        repeat(ending)
        time.sleep(SETTLE_SECONDS)
        if Counted.now(client).stored == before.stored:
            return False
    return True


def kv_event(
    client: FrontendClient,
    first: CacheUse,
    again: CacheUse,
    before: Counted,
    effort: str,
    repeat: Callable[[str], CacheUse],
) -> ProofStep:
    """The router's own figure: it knows the prompt only when the worker's event has arrived."""
    if again.hit_rate is None or first.hit_rate is None:
        return ProofStep(
            "kv event",
            NOT_PROVEN,
            "the router does not look at caches",
            "it does with 'frontend --router kv', and not for a worker in text mode (--use-vllm-tokenizer)",
        )
    figure = f"the router knew {again.hit_rate:.0%} of a repeated prompt, {first.hit_rate:.0%} at first"
    if again.hit_rate <= first.hit_rate:
        return ProofStep(
            "kv event",
            FAILED,
            f"{figure}; {effort}",
            "does the worker publish events? its 'ready' line says kv_event_publishers=1; "
            "--kv-events off, prefix caching off and the fake engine publish none",
        )
    after = Counted.now(client)
    if not (counted := after.since(before)) or (after.batches is None and predicts(client, repeat)):
        return ProofStep(
            "kv event",
            NOT_PROVEN,
            f"{figure}, but perhaps from no event",
            "it predicts the caches (--no-use-kv-events), or over NATS other requests come all the time",
        )
    return ProofStep("kv event", OK, f"{figure}; {counted}; {effort}")


def prefix_cache(first: CacheUse, again: CacheUse) -> ProofStep:
    figure = f"{again.cached} of {again.prompt} prompt tokens came from the cache, {first.cached} at first"
    if again.cached > first.cached:
        return ProofStep("prefix cache", OK, figure)
    # Only a router that looks at caches sends the prompt to where it lies.
    outcome = NOT_PROVEN if again.hit_rate is None else FAILED
    return ProofStep("prefix cache", outcome, figure, "is prefix caching off, or did another worker answer?")


def hand_over(first: CacheUse) -> ProofStep:
    """Whether the decode worker took the cache of a prompt nobody had seen before."""
    figure = f"{first.cached} of {first.prompt} prompt tokens came from a prefill worker"
    # vLLM may compute the last token again, for its output.
    if first.cached >= first.prompt - 1:
        return ProofStep("hand-over", OK, figure)
    return ProofStep(
        "hand-over",
        FAILED,
        figure,
        "the decode worker computed the rest itself: its log says which transfer failed",
    )
