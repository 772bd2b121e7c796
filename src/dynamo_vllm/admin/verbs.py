"""The table of verbs, and how one runs: a new verb is one function and one line here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.admin import cache, life, lora, profile
from dynamo_vllm.admin.base import Verb, WorkerState
from dynamo_vllm.errors import AdminError, BadCommand, EngineDead, WrongState
from dynamo_vllm.wire import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.admin.base import Controls, Reply

logger = logging.getLogger(__name__)
# A sleeping engine must not be touched: its memory is freed.
_AWAKE = frozenset({WorkerState.READY, WorkerState.UNWELL, WorkerState.PAUSED})
_SERVING = frozenset({WorkerState.READY})

_TABLE = (
    Verb(
        name="load_lora",
        help="fetch, check and serve an adapter",
        run=lora.load_lora,
        body=lora.LoadBody,
        states=_SERVING,
        has_endpoint=True,
        rest=("POST", "/v1/loras"),
    ),
    Verb(
        name="unload_lora",
        help="stop serving an adapter, after the requests that use it",
        run=lora.unload_lora,
        body=lora.UnloadBody,
        states=_SERVING,
        has_endpoint=True,
        rest=("DELETE", "/v1/loras/{lora_name}"),
    ),
    Verb(
        name="list_loras",
        help="adapters and their states",
        run=lora.list_loras,
        has_endpoint=True,
        rest=("GET", "/v1/loras"),
    ),
    Verb(name="sleep", help="leave, drain, free memory", run=life.sleep, body=life.SleepBody),
    Verb(name="wake_up", help="end sleep and serve again", run=life.wake_up),
    Verb(name="pause", help="leave and stand still", run=life.pause, body=life.PauseBody),
    Verb(name="resume", help="end a pause and serve again", run=life.resume),
    Verb(
        name="clear_kv_blocks",
        help="forget all cached prefixes",
        run=cache.clear_kv_blocks,
        states=_AWAKE,
        has_endpoint=True,
    ),
    Verb(
        name="reset_caches",
        help="forget prefixes, media and encoder outputs",
        run=cache.reset_caches,
        body=cache.ResetBody,
        states=_AWAKE,
    ),
    Verb(
        name="prove_tiers",
        help="load a short prompt from the tiers of KV caches",
        run=cache.prove_tiers,
        states=_SERVING,
    ),
    Verb(
        name="start_profile",
        help="record what the engine does",
        run=profile.start_profile,
        body=profile.ProfileBody,
        states=_AWAKE,
    ),
    Verb(name="stop_profile", help="write the profile", run=profile.stop_profile, states=_AWAKE),
    Verb(name="status", help="state, load and adapters", run=life.status),
)
VERBS = {verb.name: verb for verb in _TABLE}


async def perform(
    name: str, body: object, worker: Controls, on_dead: Callable[[EngineDead], None] = lambda _: None
) -> Reply:
    """Run a verb; the reply says how it went, and nothing is raised."""
    try:
        return {"status": "success", **await _perform(name, body, worker)}
    except AdminError as exc:
        logger.info("%s: refused: %s", name, exc)
        return failure(exc)
    except EngineDead as exc:
        on_dead(exc)
        return failure(AdminError("the engine is dead; the worker ends"))
    except Exception:
        logger.exception("%s failed", name)
        return failure(AdminError("it failed; the worker's log says why"))


async def _perform(name: str, body: object, worker: Controls) -> Reply:
    verb = VERBS.get(name)
    if verb is None:
        raise BadCommand(f"{name!r} is not a verb; there are {', '.join(VERBS)}")
    try:
        parsed = msgspec.convert({} if body is None else body, verb.body)
    except msgspec.ValidationError as exc:
        raise BadCommand(describe(exc)) from None
    if worker.life.state not in verb.states:
        allowed = " or ".join(sorted(state.value for state in verb.states))
        raise WrongState(f"this worker is {worker.life.state.value}; {name} needs it {allowed}")
    return await verb.run(parsed, worker)


def failure(exc: AdminError) -> Reply:
    return {"status": "error", "error": exc.kind, "message": str(exc), "code": exc.status}
