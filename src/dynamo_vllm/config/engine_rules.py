"""Our defaults over vLLM's, each with its reason. The user's settings win."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MIB = 2**20
LEAST_CPU_CACHE, MOST_CPU_CACHE = 256 * MIB, 8192 * MIB
_BLOCKS = "num_gpu_blocks_override"
CACHE_SIZE_ARGUMENTS = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization", _BLOCKS})
"""A user who sets one of these has decided how much memory the cache takes."""
LEAST_SOUND_TOKENS = 2048
"""vLLM's own default on a CPU."""
UserArgs = Mapping[str, Any]
"""The engine arguments the user gave, by vLLM's field name; a name that is absent was not given."""


LOOPBACK = "[::ffff:127.0.0.1]"
"""Loopback, written so that vLLM 0.30 binds it; its events hold the token ids of prompts."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a rule may use besides the user's arguments."""

    device: str
    has_bfloat16: bool = True
    """Whether the CPU can run vLLM's bfloat16 kernels."""
    publishes_kv_events: bool = True
    binds_threads: bool = False
    """The user binds vLLM's CPU threads to cores, which vLLM does in a separate process."""
    nixl: bool = False
    has_plain_blocks: bool = False
    """A KV connector that supports one kind of cache block."""
    merged_kv_events: str | None = None
    """Where a connector publishes the engine's KV events together with its own."""
    kv_event_port: int | None = None
    """First port of KV events; the caller names one when there are several data-parallel ranks."""
    kv_event_host: str = LOOPBACK
    """Whether it listens on this machine only; the ranks of a headless node connect to their leader."""
    socket_folder: str = "/tmp"
    encodes_only: bool = False
    """The engine runs only the model's vision encoder."""
    takes_encoded: bool = False
    """Media may come as the output of an encode worker."""
    pools: bool = False
    """The model computes vectors or scores, not text."""
    source_positions: int = 0
    """Tokens of the longest sound of a model that writes down speech; 0 for any other model."""
    lora: bool = False
    """Adapters are loaded at run time, by our own option."""
    traces_url: str | None = None
    """Where spans of requests go."""
    free_bytes: int | None = None
    """Free memory on a CPU; None if the user's environment sets the size of the cache."""
    engines: int = 1
    """Number of engines on this machine that share it, and its cores."""
    cores: int | None = None
    """Cores that the engine may use on a CPU; None if the user's environment sets the number of threads."""


@dataclass(frozen=True, slots=True)
class Fired:
    """One default we set, and why; `check` prints these."""

    argument: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.argument} = {self.value}: {self.reason}"


Rule = Callable[[UserArgs, Situation], Fired | None]


def prefix_caching(user: UserArgs, at: Situation) -> Fired | None:
    if at.encodes_only:
        return Fired("enable_prefix_caching", False, "an encode worker has no KV cache")
    if "enable_prefix_caching" in user or at.pools or at.source_positions:
        return None  # vLLM knows which pooling models can have one; models with an encoder cannot
    return Fired("enable_prefix_caching", True, "KV-aware routing needs a prefix cache to route to")


def block_size(user: UserArgs, at: Situation) -> Fired | None:
    # On a GPU vLLM itself takes 16, or what the fastest attention backend of the model needs.
    if "block_size" in user or at.device != "cpu":
        return None
    return Fired("block_size", 32, "vLLM's CPU attention needs a multiple of 32")


def cpu_cache(user: UserArgs, at: Situation) -> Fired | None:
    # A number of blocks wins over a size, but vLLM wants the memory of the size, or 92 % of all, to be free.
    if at.device != "cpu" or at.free_bytes is None or (CACHE_SIZE_ARGUMENTS - {_BLOCKS}) & user.keys():
        return None
    room = min(max(at.free_bytes // 4 // at.engines, LEAST_CPU_CACHE), MOST_CPU_CACHE)
    part = "a quarter of the free memory" + (f" for {at.engines} engines together" if at.engines > 1 else "")
    return Fired(
        "kv_cache_memory_bytes",
        room // MIB * MIB,
        f"{part}, at most 8 GiB for one engine; vLLM would reserve 92 % of all memory, or fail to start",
    )


OMP_THREADS = "OMP_NUM_THREADS"
"""A variable, not an argument of vLLM: OpenMP's number of threads."""


def cpu_threads(_: UserArgs, at: Situation) -> Fired | None:
    if at.device != "cpu" or at.cores is None:
        return None
    shared = f", the others are shared by {at.engines} engines" if at.engines > 1 else ""
    return Fired(
        OMP_THREADS,
        max(1, (at.cores - 1) // at.engines),
        f"one of {at.cores} usable {'cores' if at.cores > 1 else 'core'} is left for other work{shared}",
    )


def runner(user: UserArgs, at: Situation) -> Fired | None:
    if "runner" in user:
        return None
    if at.pools:
        return Fired("runner", "pooling", "this worker serves a pooling model")
    return Fired("runner", "generate", "this worker serves generation")


def request_logging(user: UserArgs, _: Situation) -> Fired | None:
    if "enable_log_requests" in user:
        return None
    return Fired("enable_log_requests", False, "prompts must not be in logs")


def cpu_executor(user: UserArgs, at: Situation) -> Fired | None:
    if at.device != "cpu" or at.binds_threads or not _chooses_executor(user):
        return None
    reason = (
        "one process less to start; the queue to a second process busy-waits, four times slower with NIXL"
    )
    return Fired("distributed_executor_backend", "uni", reason)


def nixl_executor(user: UserArgs, at: Situation) -> Fired | None:
    if at.device == "cpu" or not at.nixl or not _chooses_executor(user):
        return None
    reason = "NIXL's threads and a one-process engine share one GIL"
    return Fired("distributed_executor_backend", "mp", reason)


def _chooses_executor(user: UserArgs) -> bool:
    """Return whether one process is enough, and the user chose nothing."""
    widths = ("tensor_parallel_size", "pipeline_parallel_size", "nnodes")
    return "distributed_executor_backend" not in user and all((user.get(name) or 1) == 1 for name in widths)


def kv_events(user: UserArgs, at: Situation) -> Fired | None:
    if "kv_events_config" in user or not at.publishes_kv_events or not _is_cached(user):
        return None
    value = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": _event_endpoint(at),
        "topic": "",
    }
    return Fired("kv_events_config", value, "the router follows the cache through these events")


def connect_address(endpoint: str, host: str) -> str:
    """Where to connect for what vLLM publishes at an endpoint that it binds."""
    for everywhere in (LOOPBACK, "*", "[::]"):
        endpoint = endpoint.replace(everywhere, host)
    return endpoint


def _is_cached(user: UserArgs) -> bool:
    return bool(user.get("enable_prefix_caching", True))


def _event_endpoint(at: Situation) -> str:
    # vLLM 0.30 binds an address with *, :: or ipc://; any other it connects to, which must then listen.
    # It adds the rank to a TCP port, and refuses ipc:// for ranks above 0.
    if at.kv_event_port is None:
        return f"ipc://{at.socket_folder}/kv-events"
    return f"tcp://{at.kv_event_host}:{at.kv_event_port}"


def merged_kv_events(user: UserArgs, at: Situation) -> Fired | None:
    """KVBM needs three addresses: vLLM's events, where it binds, where it is read."""
    given = dict(user.get("additional_config") or {})
    if at.merged_kv_events is None or "consolidator_endpoints" in given or not _is_cached(user):
        return None
    if "kv_events_config" in user:
        written = user["kv_events_config"]
        config = written if isinstance(written, Mapping) else vars(written)
        if not config.get("enable_kv_cache_events") or config.get("publisher") == "null":
            return None
        endpoint = str(config["endpoint"])
    elif at.publishes_kv_events:
        endpoint = _event_endpoint(at)
    else:
        return None
    value = given | {
        "consolidator_endpoints": [
            connect_address(endpoint, "127.0.0.1"),
            at.merged_kv_events,
            at.merged_kv_events,
        ]
    }
    return Fired("additional_config", value, "KVBM publishes vLLM's KV events together with its own")


def hybrid_cache(user: UserArgs, at: Situation) -> Fired | None:
    if not at.has_plain_blocks or "disable_hybrid_kv_cache_manager" in user:
        return None
    # vLLM 0.30 detects such a connector alone; it does not detect KVBM together with NIXL, nor that
    # the decode worker at the other end of NIXL must do the same.
    reason = "the KV connector supports one kind of cache block"
    return Fired("disable_hybrid_kv_cache_manager", True, reason)


def dtype(user: UserArgs, at: Situation) -> Fired | None:
    if at.device != "cpu" or at.has_bfloat16 or "dtype" in user:
        return None
    return Fired("dtype", "float32", "vLLM's bfloat16 kernels crash on this CPU (illegal instruction)")


COMPILE_ARGUMENTS = frozenset({"enforce_eager", "compilation_config", "optimization_level"})
"""A user who sets one of these has decided what is compiled."""


def cpu_eager(user: UserArgs, at: Situation) -> Fired | None:
    if at.device != "cpu" or COMPILE_ARGUMENTS & user.keys():
        return None
    reason = "compiling a model takes minutes on a CPU, needs a C++ compiler and hardly makes it faster"
    return Fired("enforce_eager", True, reason)


def gpu_memory_service(user: UserArgs, _: Situation) -> Fired | None:
    if user.get("load_format") != "gms" or "worker_cls" in user:
        return None
    value = "gpu_memory_service.integrations.vllm.worker.GMSWorker"
    return Fired("worker_cls", value, "the package's own worker has the loader for --load-format gms")


def cpu_patches(user: UserArgs, at: Situation) -> Fired | None:
    if at.device != "cpu" or "worker_extension_cls" in user:
        return None
    value = "dynamo_vllm.engine.patches.cpu_worker.CpuWorkerExtension"
    return Fired("worker_extension_cls", value, "our patches for vLLM's CPU workers, which `check` lists")


def unchunked_prefill(user: UserArgs, at: Situation) -> Fired | None:
    # vLLM 0.30 switches it off itself for an encoder, after it chose the step's size: a longer prompt waits
    # forever, and so do all requests after it.
    if not at.encodes_only:
        return None
    return Fired(
        "enable_chunked_prefill", False, "an encode worker processes a prompt in one step, however long"
    )


def whole_sounds(user: UserArgs, at: Situation) -> Fired | None:
    if not at.source_positions or "max_num_batched_tokens" in user:
        return None
    # vLLM 0.32 takes 2048 on a CPU, fewer if there are few sequences, and refuses to start with too few.
    if at.device != "cpu" and "max_num_seqs" not in user:
        return None
    return Fired(
        "max_num_batched_tokens",
        max(LEAST_SOUND_TOKENS, at.source_positions),
        "the encoder takes a window of sound in one step",
    )


def sound_cache(user: UserArgs, at: Situation) -> Fired | None:
    if not at.source_positions or "mm_processor_cache_gb" in user:
        return None
    return Fired("mm_processor_cache_gb", 0, "no window of sound comes twice; vLLM would keep 4 GiB of them")


def encoded_media(user: UserArgs, at: Situation) -> Fired | None:
    if not at.takes_encoded or "enable_mm_embeds" in user:
        return None
    return Fired("enable_mm_embeds", True, "encode workers send their output instead of pixels")


DEFAULT_ADAPTERS = 4


def lora(user: UserArgs, at: Situation) -> Fired | None:
    if not at.lora or "enable_lora" in user:
        return None
    return Fired("enable_lora", True, "adapters are loaded at run time")


def lora_slots(user: UserArgs, at: Situation) -> Fired | None:
    """On CPU also over the user's number, which stays the number of adapters that can be loaded."""
    if not user.get("enable_lora", at.lora):
        return None
    wanted = user.get("max_loras")
    if at.device == "cpu":
        # vLLM 0.30: with every slot taken, a request without adapter gets the output of one.
        reason = "one slot stays free: otherwise vLLM's CPU kernels mix up requests without an adapter"
        return Fired("max_loras", (wanted or DEFAULT_ADAPTERS) + 1, reason)
    if wanted is not None:
        return None
    return Fired("max_loras", DEFAULT_ADAPTERS, "vLLM's default is one adapter")


def memory_reports(user: UserArgs, at: Situation) -> Fired | None:
    if at.device == "cpu" or not user.get("enable_sleep_mode") or "worker_extension_cls" in user:
        return None
    value = "dynamo_vllm.engine.process.gpu_memory.MemoryExtension"
    return Fired("worker_extension_cls", value, "sleep reports how much memory it freed")


def traces(user: UserArgs, at: Situation) -> Fired | None:
    if at.traces_url is None or "otlp_traces_endpoint" in user:
        return None
    return Fired("otlp_traces_endpoint", at.traces_url, "the engine's spans belong to the request's trace")


RULES: tuple[Rule, ...] = (
    prefix_caching,
    block_size,
    cpu_cache,
    cpu_threads,
    cpu_eager,
    dtype,
    runner,
    request_logging,
    cpu_executor,
    nixl_executor,
    kv_events,
    merged_kv_events,
    hybrid_cache,
    gpu_memory_service,
    cpu_patches,
    unchunked_prefill,
    whole_sounds,
    sound_cache,
    encoded_media,
    lora,
    lora_slots,
    memory_reports,
    traces,
)


def apply(user: UserArgs, situation: Situation) -> list[Fired]:
    """The defaults that apply to these arguments, in the order of RULES."""
    return [fired for rule in RULES if (fired := rule(user, situation)) is not None]
