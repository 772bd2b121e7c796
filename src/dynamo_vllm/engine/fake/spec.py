"""Declares the options of the fake engine, parses them, and says what follows from them."""

from __future__ import annotations

import msgspec

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.job import AdapterLimits, EngineFacts, PoolingFacts, SpeechFacts


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
    medium: str = "GPU"
    """Where they lie: GPU, CPU or STORAGE, as vLLM calls it in its events."""
    removed: bool = False
    """Announces that they have left this medium."""


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
    cached: tuple[CachedBlocks, ...] = ()
    """Is announced in this order."""
    pooling: str | None = None
    """embed or classify: the engine pools instead of generating."""
    dimensions: int = 8
    """Of its embeddings; they may be cut to any smaller number."""
    labels: int = 1
    """How many classes it has; with one it scores pairs."""
    transcription: bool = False
    """The engine writes down speech: a word for each second."""
    window_seconds: float = 10
    """The longest sound that it hears at once."""


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
        pooling=_pooling(spec),
        speech=_speech(spec),
    )


def _speech(spec: FakeSpec) -> SpeechFacts | None:
    if not spec.transcription:
        return None
    from dynamo_vllm.engine.fake.speech import LANGUAGES  # which imports numpy

    return SpeechFacts(languages=LANGUAGES, window_seconds=spec.window_seconds, tokens_per_second=50)


def _pooling(spec: FakeSpec) -> PoolingFacts | None:
    if spec.pooling is None:
        return None
    embeds = spec.pooling == "embed"
    scoring = "bi-encoder" if embeds else "cross-encoder" if spec.labels == 1 else None
    return PoolingFacts(
        task=spec.pooling,
        tasks=(spec.pooling,),
        dimensions=spec.dimensions,
        smaller=() if embeds else None,
        labels=() if embeds else tuple(f"label {number}" for number in range(spec.labels)),
        scoring=scoring,
        longest=spec.context_length,
    )
