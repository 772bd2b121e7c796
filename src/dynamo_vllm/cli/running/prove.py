"""Tests a running system: it is ready, it answers, its KV events arrive and its prefix cache is used."""

from __future__ import annotations

import contextlib
import enum
import io
import random
import time
import wave
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.observe.frontend_client import (
    FrontendClient,
    Unanswered,
    answered,
    ready_models,
    reason,
)
from dynamo_vllm.supervise.probe import smallest_media_requests, went_over_two

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import httpx

# An event takes some milliseconds from the engine to the router.
EVENT_SECONDS = 10.0
PAUSE_SECONDS = 0.1
# Enough for several blocks of any usual size, and few enough for a small context at one token per letter.
WORDS = 120
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
# The frontend counts the batches of KV events that its router gets over ZMQ, unless the router predicts.
_EVENT_BATCHES = "_router_kv_zmq_ingress_batches_total"
# It also counts every event, over NATS too; a predicting router counts its predictions here.
_EVENTS = "_kv_cache_events_applied_total"  # the page omits `_total`; the parser adds it
SETTLE_SECONDS = 0.5
NOT_FOUND = 404
GENERATES = {"chat", "completions", "images", "videos", "audios"}
TRANSCRIPTIONS = "transcriptions"
_POOLED: dict[str, dict[str, Any]] = {
    "embeddings": {"input": "Hello"},
    "rerank": {"query": "Hello", "documents": ["Hello"]},
    "classify": {"input": "Hello"},
    "pooling": {"input": "Hello"},
}
POOLS = tuple(_POOLED)
"""APIs of models that compute vectors, classes or scores, in the order in which they are tried."""


class Proof(enum.StrEnum):
    OK = "ok"
    FAILED = "FAILED"
    NOT_PROVEN = "not proven"
    SKIPPED = "skipped"
    """There is nothing to prove."""


OK, FAILED, NOT_PROVEN, SKIPPED = Proof.OK, Proof.FAILED, Proof.NOT_PROVEN, Proof.SKIPPED


@dataclass(frozen=True, slots=True)
class ProofStep:
    """The outcome of one test."""

    name: str
    outcome: Proof
    figure: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{self.outcome:<10}  {self.name:<12}  {self.figure}"
        return f"{line}\n{'':<12}{self.hint}" if self.hint else line


def prove(client: FrontendClient, wanted: str | None) -> Iterator[ProofStep]:
    """Run the steps in order and yield them; without a model or a connection the rest is left out."""
    try:
        yield health(client)
        listing, model = listed(client, wanted)
        yield listing
        if model is None:
            return
        path, answering = answer(client, model["id"], model.get("apis"))
        yield answering
        if path is not None:
            yield from cache(client, path, model)
    except Unanswered as exc:
        yield ProofStep("connection", FAILED, str(exc))


def health(client: FrontendClient) -> ProofStep:
    response = client.get("/health")
    ready = ready_models(response)
    if ready is None and response.status_code >= 500:
        return ProofStep("health", FAILED, reason(response))
    if ready is None:
        # Upstream's frontend is "healthy" even without a model, and other servers have other words.
        listed_names = ", ".join(str(model["id"]) for model in client.models())
        figure = f"/v1/models lists {listed_names}; /health is not that of our frontend"
        return no_model(response) if not listed_names else ProofStep("health", OK, figure)
    if response.status_code == 200 and ready:
        return ProofStep("health", OK, f"ready with {', '.join(ready)}")
    return no_model(response)


def no_model(response: httpx.Response) -> ProofStep:
    return ProofStep(
        "health",
        FAILED,
        f"HTTP {response.status_code}, no model can answer",
        "wait for the worker's 'ready' line; same --namespace and discovery on both sides?",
    )


def listed(client: FrontendClient, wanted: str | None) -> tuple[ProofStep, dict[str, Any] | None]:
    """Return the model that the other steps use."""
    served = client.models()
    names = [str(model["id"]) for model in served]
    found = next((model for model in served if wanted in (None, model["id"])), None)
    if found is None:
        hint = f"served models: {', '.join(names)}" if names else "no worker has registered a model"
        return ProofStep("model", FAILED, f"{wanted or 'any model'} is not listed by /v1/models", hint), None
    return ProofStep(
        "model", OK, f"{found['id']}, context of {found.get('context_window', '?')} tokens"
    ), found


def answer(
    client: FrontendClient, model: str, apis: Collection[str] | None = None
) -> tuple[str | None, ProofStep]:
    """Return the path that generates text: chat, or completions for a model without a chat template.

    A gateway says which APIs a model has; at a frontend all are tried.
    """
    began = time.monotonic()
    errors = []
    if apis is not None and TRANSCRIPTIONS in apis:
        return None, transcript(client, model, began)
    if apis is not None and not GENERATES & set(apis):
        missing = ProofStep("answer", FAILED, f"{model} has no API that this command knows")
        return None, pooled(client, model, began, apis) or missing
    # Before the chat: there an image model would run all its steps.
    for path, smallest in smallest_media_requests(model).values():
        with contextlib.suppress(Unanswered):
            if client.ask(path, smallest).get("data"):
                return None, image_step(path, began)
    for path in ("/v1/chat/completions", "/v1/completions"):
        try:
            body = client.ask(path, {**prompt_fields(path, "Say hello."), "model": model, "max_tokens": 8})
        except Unanswered as exc:
            errors.append(f"{path}: {exc}")
            continue
        tokens = (body.get("usage") or {}).get("completion_tokens", 0)
        figure = f"{tokens} tokens from {path} in {1000 * (time.monotonic() - began):.0f} ms"
        drawn = isinstance(((body.get("choices") or [{}])[0].get("message") or {}).get("content"), list)
        if drawn:
            return None, image_step(path, began)
        if tokens:
            return path, ProofStep("answer", OK, figure)
        errors.append(f"{path}: an empty answer")
    if apis is None and (step := pooled(client, model, began, POOLS)) is not None:
        return None, step
    return None, ProofStep("answer", FAILED, "; ".join(errors), "the worker's log says why")


def pooled(client: FrontendClient, model: str, began: float, apis: Collection[str]) -> ProofStep | None:
    """Ask a model for a vector, a class or a ranking; None if it has no such API."""
    for api in (name for name in POOLS if name in apis):
        try:
            found = answered(client.post(f"/v1/{api}", {"model": model, **_POOLED[api]}))
        except Unanswered as exc:
            if exc.status == NOT_FOUND:
                continue
            return ProofStep("answer", FAILED, f"/v1/{api}: {exc}", "the worker's log says why")
        items = found if isinstance(found, list) else found.get("data") or found.get("results") or ()
        if items:
            return ProofStep("answer", OK, f"{_in(api, items)} from /v1/{api} in {_since(began)}")
        return ProofStep("answer", FAILED, f"/v1/{api}: an empty answer", "the worker's log says why")
    return None


def _in(api: str, items: Sequence[Any]) -> str:
    if api == "embeddings":
        return f"a vector of {len(items[0]['embedding'])} numbers"
    return {"rerank": "a ranking", "classify": "a class"}.get(api, "a pooled output")


def transcript(client: FrontendClient, model: str, began: float) -> ProofStep:
    """Send a second of silence; its transcript may be empty."""
    try:
        client.upload(f"/v1/audio/{TRANSCRIPTIONS}", {"model": model}, ("silence.wav", silence()))
    except Unanswered as exc:
        return ProofStep("answer", FAILED, f"/v1/audio/{TRANSCRIPTIONS}: {exc}", "the worker's log says why")
    return ProofStep("answer", OK, f"a transcript of a second of silence in {_since(began)}")


def silence(seconds: int = 1, rate: int = 16000) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(bytes(2 * rate * seconds))
    return made.getvalue()


def _since(began: float) -> str:
    return f"{1000 * (time.monotonic() - began):.0f} ms"


def image_step(path: str, began: float) -> ProofStep:
    return ProofStep("answer", OK, f"an image from {path} in {1000 * (time.monotonic() - began):.0f} ms")


def prompt_fields(path: str, text: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def unique_prompt(context_length: int | None) -> str:
    """Return random words, which no cache has yet; they have at most one token per letter."""
    words = min(WORDS, (context_length or 4096) // 8)
    return " ".join("".join(random.choices(_ALPHABET, k=5)) for _ in range(words))


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The use of caches for one answer."""

    hit_rate: float | None
    """The share of the prompt that the router expected in the worker's cache; None if it ignores caches."""
    cached: int
    prompt: int
    handed_over: bool = False
    """Whether a prefill worker computed the prompt."""
    not_computed: int = 0
    """The tokens that the decode worker fetched or had cached."""


def serve_once(client: FrontendClient, path: str, model: str, prompt: str) -> CacheUse:
    extra = {"extra_fields": ["worker_id", "timing", "engine_data"]}
    body = client.ask(path, {**prompt_fields(path, prompt), "model": model, "max_tokens": 1, "nvext": extra})
    more = body.get("nvext") or {}
    timing = more.get("timing") or {}
    usage = body.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return CacheUse(
        hit_rate=timing.get("kv_hit_rate"),
        cached=cached,
        prompt=usage.get("prompt_tokens") or 0,
        handed_over=went_over_two(body),
        # Workers that are not ours count what was fetched as cached.
        not_computed=(more.get("engine_data") or {}).get("decode_cached_tokens", cached),
    )


def cache(client: FrontendClient, path: str, model: dict[str, Any]) -> Iterator[ProofStep]:
    """Send a new prompt, and repeat it until the router knows it and the cache is used."""
    prompt = unique_prompt(model.get("context_window"))

    def repeat(ending: str = "") -> CacheUse:
        return serve_once(client, path, model["id"], prompt + ending)

    before = Counted.now(client)
    first = repeat()
    began = time.monotonic()
    again, tries = first, 0
    while time.monotonic() - began < EVENT_SECONDS:
        again, tries = repeat(), tries + 1
        # More than at first, because the beginning of the chat template may be cached already.
        knows = again.hit_rate is None or again.hit_rate > (first.hit_rate or 0)
        if knows and (again.cached > first.cached or first.handed_over):
            break
        time.sleep(PAUSE_SECONDS)
    seconds = time.monotonic() - began
    yield kv_event(client, first, again, before, f"tries: {tries} in {seconds:.2f} s", repeat)
    yield hand_over(first) if first.handed_over else prefix_cache(first, again)


@dataclass(frozen=True, slots=True)
class Counted:
    """The frontend's counters of KV events."""

    batches: float | None
    """Batches over ZMQ; None if no router of the frontend listens there."""
    stored: float
    """Events of new blocks, received or predicted."""

    @classmethod
    def now(cls, client: FrontendClient) -> Counted:
        samples = client.samples()
        batches = [sample.value for sample in samples if sample.name.endswith(_EVENT_BATCHES)]
        wanted = {"event_type": "stored", "status": "ok"}.items()
        stored = [s.value for s in samples if s.name.endswith(_EVENTS) and wanted <= s.labels.items()]
        return cls(sum(batches) if batches else None, sum(stored))

    def since(self, before: Counted) -> str:
        """Describe the growth; empty if there is none."""
        if self.batches is not None and before.batches is not None:
            return f"event batches: {self.batches - before.batches:.0f}"
        return f"events: {self.stored - before.stored:.0f}" if self.stored > before.stored else ""


def predicts(client: FrontendClient, repeat: Callable[[str], CacheUse]) -> bool:
    """Return whether the router predicts: it then counts every request; workers send only new blocks.

    There are two endings, because vLLM computes a full last block again and sends an event for it.
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
    """Judge by the router's own figure: it knows the prompt only after the worker's event arrived."""
    if again.hit_rate is None or first.hit_rate is None:
        return ProofStep(
            "kv event",
            NOT_PROVEN,
            "the router does not consider caches",
            "it does with 'frontend --router kv', but not for a worker in text mode (--use-vllm-tokenizer)",
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
            f"{figure}, but perhaps without an event",
            "the router predicts caches (--no-use-kv-events), or other requests send events over NATS",
        )
    return ProofStep("kv event", OK, f"{figure}; {counted}; {effort}")


def prefix_cache(first: CacheUse, again: CacheUse) -> ProofStep:
    figure = f"{again.cached} of {again.prompt} prompt tokens came from the cache, {first.cached} at first"
    if again.cached > first.cached:
        return ProofStep("prefix cache", OK, figure)
    # Only a router that considers caches sends the prompt to the worker that has it.
    outcome = NOT_PROVEN if again.hit_rate is None else FAILED
    return ProofStep("prefix cache", outcome, figure, "is prefix caching off, or did another worker answer?")


def hand_over(first: CacheUse) -> ProofStep:
    """Judge whether the decode worker got the KV cache of a new prompt from a prefill worker."""
    figure = f"{first.not_computed} of {first.prompt} prompt tokens came from a prefill worker"
    # vLLM may compute the last token again, for its output.
    if first.not_computed >= first.prompt - 1:
        return ProofStep("hand-over", OK, figure)
    return ProofStep(
        "hand-over",
        FAILED,
        figure,
        "the decode worker computed the rest itself: its log says which transfer failed",
    )
