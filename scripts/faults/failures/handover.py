"""Faults between the workers of one request: prefill, decode and encode, with vLLM on CPU under `serve`.

Each request has a cache salt of its own, so that no cache spares it the way over all of them. A step is held
by SIGSTOP for its engine, so that the fault hits requests in exactly that step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
from tiny_models.vision import make_tiny_vision_model

from cpu.vision import body, of_user
from faults.deployment import pids, real, workers
from faults.load import Load, long_answers
from faults.others import CHAT, Request
from faults.scenario import Counts, Fault, Run, needs_cpu_engine
from harness.served import Serving
from harness.stack import Worker
from harness.waiting import until

CLIENTS, TOKENS, PROMPT = 3, 50, 300
PAUSE_SECONDS = 1.0
"""Between an answer and the next request, after the kill: the replacement starts on the same few cores."""
NOTICED_SECONDS = 1
"""Within them `serve` takes a killed worker out of discovery."""
RUNS = 4
"""Of one deployment, so that `serve` starts a killed worker again at once or soon."""
IN_FLIGHT = "dynamo_component_requests_in_flight"
LOST = "dynamo_component_kv_transfers_lost_total"
ASKED = "dynamo_component_requests_total"
WAITING = "vllm:num_requests_waiting_by_reason"


@contextlib.contextmanager
def two_and_two(folder: Path, model: Path) -> Iterator[Serving]:
    with real(folder, model, "--prefill", "2", "--decode", "2") as serving:
        yield serving


@contextlib.contextmanager
def one_and_one(folder: Path, model: Path) -> Iterator[Serving]:
    with real(folder, model, "--prefill", "1", "--decode", "1") as serving:
        yield serving


@contextlib.contextmanager
def with_encoder(folder: Path, _: Path) -> Iterator[Serving]:
    model = make_tiny_vision_model(folder / "vision", "qwen2.5-vl")
    with real(folder, model, "--workers", "1", "--encode", "1") as serving:
        yield serving


# --- moments ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held(*found: Worker) -> Iterator[None]:
    """Their engines do nothing meanwhile; the workers themselves go on."""
    engines = [process for worker in found for process in psutil.Process(worker.pid).children(recursive=True)]
    try:
        for engine in engines:
            engine.suspend()
        yield
    finally:
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()


def by_age(serving: Serving, role: str) -> list[Worker]:
    """The oldest first."""
    return sorted(workers(serving, role), key=lambda worker: psutil.Process(worker.pid).create_time())


def in_flight(worker: Worker) -> float:
    return worker.metric(IN_FLIGHT)


def lost(decodes: Sequence[Worker]) -> float:
    """KV caches which decode workers could not fetch."""
    return sum(worker.metric(LOST) for worker in decodes)


def kill_while_computing(serving: Serving, load: Load) -> None:
    victim = by_age(serving, "prefill")[0]
    with held(victim):
        until("a prompt there", partial(in_flight, victim))
        kill(victim, load)


def kill_before_the_transfer(serving: Serving, load: Load) -> None:
    """Prompts are computed, and no decode engine has begun to fetch a KV cache."""
    victim, decodes = by_age(serving, "prefill")[0], workers(serving, "decode")
    before = lost(decodes)
    with contextlib.ExitStack() as decoding:
        with held(victim):
            until("a prompt there", partial(in_flight, victim))
            decoding.enter_context(held(*decodes))
        until("the prompt's end", lambda: in_flight(victim) == 0)
        kill(victim, load)
    until("a KV cache that is lost", lambda: lost(decodes) > before)


def kill_in_the_transfer(serving: Serving, load: Load) -> None:
    """A decode engine waits for blocks which the stopped prefill engine does not send."""
    victim, decodes = by_age(serving, "prefill")[0], workers(serving, "decode")
    before = lost(decodes)
    with contextlib.ExitStack() as prefilling:
        with contextlib.ExitStack() as decoding:
            with held(victim):
                until("a prompt there", partial(in_flight, victim))
                decoding.enter_context(held(*decodes))
            until("the prompt's end", lambda: in_flight(victim) == 0)
            prefilling.enter_context(held(victim))
        until("a transfer", lambda: any(w.metric(WAITING, reason="deferred") for w in decodes))
        kill(victim, load)
    until("a KV cache that is lost", lambda: lost(decodes) > before)


def kill_after_the_transfer(serving: Serving, load: Load) -> None:
    """Every client has a part of its answer."""
    victim = by_age(serving, "prefill")[0]
    until("no prompt there", lambda: load.all_have(2) and in_flight(victim) == 0 and load.all_have(2))
    kill(victim, load)


def kill_decode(serving: Serving, load: Load) -> None:
    busy = until("a busy one", lambda: [w for w in by_age(serving, "decode") if in_flight(w)])
    until("answers under way", lambda: load.all_have(2) and in_flight(busy[0]))
    kill(busy[0], load)


def kill_encoder(serving: Serving, load: Load) -> None:
    (victim,) = workers(serving, "encode")
    with held(victim):
        until("a picture there", partial(in_flight, victim))
        kill(victim, load)


def kill(victim: Worker, load: Load) -> None:
    """With its engine; looking for that one takes a busy machine a second or two, so it comes first."""
    worker = psutil.Process(victim.pid)
    every = [worker, *worker.children(recursive=True)]
    load.fault()
    for process in every:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# --- scenarios --------------------------------------------------------------------------------------------


Site = Callable[[Path, Path], contextlib.AbstractContextManager[Serving]]
TEXTS = long_answers(CLIENTS, TOKENS, prompt=PROMPT)


def killed(
    site: Site, strike: Callable[[Serving, Load], None], run: Run, requests: Sequence[Request] = TEXTS
) -> Counts:
    serving: Serving = run.sites.get(site, RUNS)
    before = pids(serving)
    with Load(serving.url, requests, salted=True, pause=PAUSE_SECONDS) as load:
        load.in_full_swing()
        strike(serving, load)
        load.recovered(lambda: is_whole(serving, before))
    assert load.failed_after(NOTICED_SECONDS) == 0, "requests fail though the worker is known to be gone"
    return load.counts()


def is_whole(serving: Serving, before: Sequence[int]) -> bool:
    """As many workers as before, one of them new, and each of them was asked."""
    found = workers(serving)
    return (
        len(found) == len(before) == len(serving.stack.instances())
        and sorted(worker.pid for worker in found) != before
        and all(worker.metric(ASKED, dynamo_endpoint="generate") for worker in found)
    )


def pictures_lost(run: Run) -> Counts:
    requests = [(CHAT, body("tiny", of_user(number), max_tokens=TOKENS)) for number in range(CLIENTS)]
    return killed(with_encoder, kill_encoder, run, requests)


SCENARIOS = (
    Fault(
        "prefill-killed-computing",
        "one of two prefill workers gets SIGKILL while it computes a prompt: the other one does",
        partial(killed, two_and_two, kill_while_computing),
        needs_cpu_engine,
    ),
    Fault(
        "prefill-killed-before-transfer",
        "one of two prefill workers gets SIGKILL before its KV caches are fetched: decode computes them",
        partial(killed, two_and_two, kill_before_the_transfer),
        needs_cpu_engine,
    ),
    Fault(
        "prefill-killed-in-transfer",
        "one of two prefill workers gets SIGKILL while a KV cache is fetched: decode computes it",
        partial(killed, two_and_two, kill_in_the_transfer),
        needs_cpu_engine,
    ),
    Fault(
        "prefill-killed-after-transfer",
        "one of two prefill workers gets SIGKILL when its KV caches are fetched: nobody notices",
        partial(killed, two_and_two, kill_after_the_transfer),
        needs_cpu_engine,
    ),
    Fault(
        "prefill-killed-alone",
        "the only prefill worker gets SIGKILL while it computes a prompt: decode computes later ones",
        partial(killed, one_and_one, kill_while_computing),
        needs_cpu_engine,
        {"503": "by the frontend, for prompts that the killed worker had: there is no other one for them"},
    ),
    Fault(
        "decode-killed",
        "one of two decode workers gets SIGKILL in mid-stream: its answers go on at the other one",
        partial(killed, two_and_two, kill_decode),
        needs_cpu_engine,
    ),
    Fault(
        "encoder-killed",
        "the only encode worker gets SIGKILL with pictures under way: the asking worker encodes them",
        pictures_lost,
        needs_cpu_engine,
    ),
)
