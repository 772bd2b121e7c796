"""Our defaults over vLLM's, each with its reason. What the user sets stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

UserArgs = Mapping[str, Any]
"""The engine arguments the user gave, by vLLM's field name; a name that is absent was not given."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a rule may look at beside the user's arguments."""

    device: str
    has_bfloat16: bool = True
    """Whether the CPU can run vLLM's bfloat16 kernels."""
    publishes_kv_events: bool = True
    binds_threads: bool = False
    """The user binds vLLM's CPU threads to cores, which vLLM does in a process of its own."""
    nixl: bool = False
    kv_event_port: int | None = None
    """First port of KV events; the caller names one when there are several data-parallel ranks."""
    kv_event_host: str = "*"
    """* listens here; the ranks of a headless node go to the node that leads them."""
    socket_folder: str = "/tmp"


@dataclass(frozen=True, slots=True)
class Fired:
    """One default we set, and why; `check` prints these."""

    argument: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.argument} = {self.value}: {self.reason}"


Rule = Callable[[UserArgs, Situation], Fired | None]


def prefix_caching(user: UserArgs, _: Situation) -> Fired | None:
    if "enable_prefix_caching" in user:
        return None
    return Fired("enable_prefix_caching", True, "KV-aware routing needs a prefix cache to route to")


def block_size(user: UserArgs, at: Situation) -> Fired | None:
    # On a GPU vLLM itself takes 16, or what the fastest attention backend of the model needs.
    if "block_size" in user or at.device != "cpu":
        return None
    return Fired("block_size", 32, "vLLM's CPU attention needs a multiple of 32")


def runner(user: UserArgs, _: Situation) -> Fired | None:
    if "runner" in user:
        return None
    return Fired("runner", "generate", "this worker serves generation")


def request_logging(user: UserArgs, _: Situation) -> Fired | None:
    if "enable_log_requests" in user:
        return None
    return Fired("enable_log_requests", False, "prompts do not belong into logs")


def cpu_executor(user: UserArgs, at: Situation) -> Fired | None:
    if at.device != "cpu" or at.binds_threads or not _chooses_executor(user):
        return None
    reason = "one process less to start; the queue to a second one spins, four times slower with NIXL"
    return Fired("distributed_executor_backend", "uni", reason)


def nixl_executor(user: UserArgs, at: Situation) -> Fired | None:
    if at.device == "cpu" or not at.nixl or not _chooses_executor(user):
        return None
    reason = "NIXL's threads and a one-process engine share one GIL"
    return Fired("distributed_executor_backend", "mp", reason)


def _chooses_executor(user: UserArgs) -> bool:
    """Whether one process could do, and the user said nothing."""
    widths = ("tensor_parallel_size", "pipeline_parallel_size", "nnodes")
    return "distributed_executor_backend" not in user and all((user.get(name) or 1) == 1 for name in widths)


def kv_events(user: UserArgs, at: Situation) -> Fired | None:
    cached = user.get("enable_prefix_caching", True)
    if "kv_events_config" in user or not at.publishes_kv_events or not cached:
        return None
    # vLLM 0.30 binds an address with *, :: or ipc://; any other it connects to, which must then listen.
    # It adds the rank to a TCP port, and refuses ipc:// for ranks above 0.
    port = at.kv_event_port
    endpoint = f"ipc://{at.socket_folder}/kv-events" if port is None else f"tcp://{at.kv_event_host}:{port}"
    value = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": ""}
    return Fired("kv_events_config", value, "the router follows the cache through these events")


def dtype(user: UserArgs, at: Situation) -> Fired | None:
    if at.device != "cpu" or at.has_bfloat16 or "dtype" in user:
        return None
    return Fired("dtype", "float32", "vLLM's bfloat16 kernels end on this CPU with an illegal instruction")


def seeded_prefill(user: UserArgs, at: Situation) -> Fired | None:
    if at.device != "cpu" or "worker_extension_cls" in user:
        return None
    value = "dynamo_vllm.engine.cpu_mend.KeepsSeeds"
    return Fired("worker_extension_cls", value, "a seeded prompt prefilled in steps ends vLLM's CPU engine")


RULES: tuple[Rule, ...] = (
    prefix_caching,
    block_size,
    dtype,
    runner,
    request_logging,
    cpu_executor,
    nixl_executor,
    kv_events,
    seeded_prefill,
)


def apply(user: UserArgs, situation: Situation) -> list[Fired]:
    """The defaults that apply to these arguments, in the order of RULES."""
    return [fired for rule in RULES if (fired := rule(user, situation)) is not None]
