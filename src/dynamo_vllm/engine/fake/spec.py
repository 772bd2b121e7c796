"""Declares the options of the fake engine, parses them, and says what follows from them."""

from __future__ import annotations

import msgspec

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.job import AdapterLimits, EngineFacts


class CachedBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks that the fake engine announces as cached. They do not change its answers."""

    count: int
    seed: str = "1"
    """Sequence n begins with the ids that random.Random(f"{seed}/{n}") chooses."""
    first: int = 0
    """The number of the first sequence."""
    step: int = 1
    """The distance to the next one; several engines can so announce every other sequence."""
    vocab: tuple[int, int] = (10, 900)


class FakeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes how the fake engine behaves."""

    start_ms: float = 0
    """The time that the start takes."""
    prefill_ms: float = 0
    """The time before the first token."""
    token_ms: float = 0
    """The time between tokens; with 0 one step follows the other at once."""
    tokens_per_output: int = 1
    context_length: int = 4096
    vocab_size: int = 1000
    block_size: int = 32
    total_kv_blocks: int = 1024
    max_num_seqs: int = 256
    max_num_queued_reqs: int | None = None
    """As in vLLM, the engine refuses more jobs than this; of its jobs max_num_seqs run, the others wait."""
    ranks: int = 1
    """The number of data-parallel ranks; a job without a rank goes to the first."""
    die_after: int | None = None
    """The engine dies after this many tokens over all requests."""
    stall_after: int | None = None
    """The engine hangs after this many tokens over all requests."""
    fail_on_token: int | None = None
    """A prompt that begins with this id fails inside the engine."""
    die_on_token: int | None = None
    """The engine dies when it gets a prompt that begins with this id."""
    stall_on_token: int | None = None
    """A prompt that begins with this id never gets a token."""
    stall_rank: int | None = None
    """A job on this rank never gets a token."""
    adapters: int = 0
    """How many LoRA adapters may be loaded."""
    adapter_ms: float = 0
    """The time that loading an adapter takes."""
    refuse_adapter: str | None = None
    """The engine refuses an adapter with this name."""
    refuse_start: bool = False
    echo: bool = False
    """The engine answers with the prompt itself, then stops."""
    media: dict[str, int] = {}
    """How many of each kind of media a prompt may have; each adds three tokens before the prompt."""
    builds_lazily: bool = False
    cached: CachedBlocks | None = None


def parse_spec(text: str | None) -> FakeSpec:
    """Parses the JSON of --fake-engine. Raises ConfigError."""
    try:
        return msgspec.json.decode(text or "{}", type=FakeSpec)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"--fake-engine: {exc}") from None


def facts_of(spec: FakeSpec, kv_events: str | None = None) -> EngineFacts:
    """Returns the engine facts that follow from the spec; `kv_events` is the address of its KV events."""
    return EngineFacts(
        context_length=spec.context_length,
        vocab_size=spec.vocab_size,
        block_size=spec.block_size,
        total_kv_blocks=spec.total_kv_blocks,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.context_length,
        data_parallel_size=spec.ranks,
        versions={"engine": "fake"},
        terms={"engine": "fake", "block_size": spec.block_size},
        adapters=AdapterLimits(spec.adapters, 16) if spec.adapters else None,
        profile_folder="fake",
        media=spec.media,
        builds_lazily=spec.builds_lazily,
        compiles_kernels=spec.builds_lazily,
        kv_event_endpoints={0: kv_events} if kv_events else {},
    )
