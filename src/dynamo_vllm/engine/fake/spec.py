"""Declares the options of the fake engine and parses them."""

from __future__ import annotations

import msgspec

from dynamo_vllm.errors import ConfigError


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


def parse_spec(text: str | None) -> FakeSpec:
    """Parses the JSON of --fake-engine. Raises ConfigError."""
    try:
        return msgspec.json.decode(text or "{}", type=FakeSpec)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"--fake-engine: {exc}") from None
