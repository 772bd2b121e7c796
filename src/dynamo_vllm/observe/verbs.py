"""Says in words what a worker did on an admin verb: one table for the commands and for the console."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo_vllm.observe.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Reply = dict[str, Any]

EVERYWHERE = frozenset({"load_lora", "unload_lora", "list_loras"})
"""Verbs for every worker, unless one is named."""


def seconds_for(verb: str, body: Mapping[str, Any], asked: float | None = None) -> float | None:
    """Return how long to wait for a reply; None for the verb's usual time."""
    if asked is None and body.get("drain_seconds"):
        from dynamo_vllm.serving.admin.client import SECONDS  # --help does not need it

        return SECONDS[verb] + float(body["drain_seconds"])
    return asked


def said(verb: str, reply: Reply) -> str:
    """Say what a worker did, or why it refused."""
    if reply.get("status") != "success":
        return refusal(reply)
    return DONE[verb](reply)


def refusal(reply: Reply) -> str:
    """Say why a worker refused."""
    message = str(reply.get("message") or "no reason given")
    if reply.get("error") in ("unreachable", "no_answer"):
        return message
    return f"refused ({reply.get('code', '?')} {reply.get('error', 'error')}): {message}"


def _loaded(reply: Reply) -> str:
    if reply.get("already_loaded"):
        return "already loaded"
    rank, count = reply.get("rank"), reply.get("bytes")
    facts = [f"rank {rank}"] * bool(rank) + [size(count)] * bool(count)
    return ", ".join([f"loaded in {_seconds(reply)}", *facts])


def _asleep(reply: Reply) -> str:
    if reply.get("already"):
        return "already asleep"
    freed = f", {size(reply['freed_bytes'])} freed" if reply.get("freed_bytes") else ""
    return f"asleep after {_seconds(reply)}{freed}"


def _awake(reply: Reply) -> str:
    return "already awake" if reply.get("already") else f"awake after {_seconds(reply)}"


def _seconds(reply: Reply) -> str:
    return f"{float(reply.get('seconds') or 0):.1f} s"


def _or_already(done: str, already: str) -> Callable[[Reply], str]:
    return lambda reply: already if reply.get("already") else done


def _tiers(reply: Reply) -> str:
    loaded, asked = (sum(rank[name] for rank in reply["ranks"]) for name in ("tier_tokens", "prompt_tokens"))
    is_same = all(rank["is_same"] for rank in reply["ranks"])
    answer = "the same answer" if is_same else "another answer"
    return f"{loaded} of {asked} prompt tokens came from its tiers, with {answer}"


DONE: dict[str, Callable[[Reply], str]] = {
    "load_lora": _loaded,
    "unload_lora": lambda reply: "unloaded",
    "list_loras": lambda reply: f"{reply.get('count', 0)} of {reply.get('capacity', '?')} adapters",
    "sleep": _asleep,
    "wake_up": _awake,
    "pause": _or_already("paused", "already paused"),
    "resume": _or_already("resumed", "was not paused"),
    "clear_kv_blocks": lambda reply: "KV blocks cleared",
    "reset_caches": lambda reply: "caches cleared",
    "prove_tiers": _tiers,
    "start_profile": lambda reply: "profiling",
    "stop_profile": lambda reply: (
        f"profile in {reply['folder']}" if reply.get("folder") else "profile written"
    ),
}
"""What a worker did, from its reply to each verb."""
