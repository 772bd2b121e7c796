"""Describes how the fake engine behaves."""

from __future__ import annotations

import msgspec

from dynamo_vllm.errors import ConfigError


class FakeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the fake engine behaves."""

    start_ms: float = 0
    """Time the start takes."""
    prefill_ms: float = 0
    """Time before the first token."""
    token_ms: float = 0
    """Time between tokens; with 0 the steps follow each other."""
    tokens_per_output: int = 1
    context_length: int = 4096
    vocab_size: int = 1000
    block_size: int = 32
    total_kv_blocks: int = 1024
    max_num_seqs: int = 256
    ranks: int = 1
    """Data-parallel ranks; a job that names none goes to the first."""
    die_after: int | None = None
    """The engine dies after this many tokens over all requests."""
    stall_after: int | None = None
    """The engine hangs after this many tokens over all requests."""
    fail_on_token: int | None = None
    """A prompt that begins with this id fails inside the engine."""
    die_on_token: int | None = None
    """The engine dies of a prompt that begins with this id, before its first token."""
    stall_on_token: int | None = None
    """A prompt that begins with this id never gets a token."""
    stall_rank: int | None = None
    """A job of this rank never gets a token."""
    adapters: int = 0
    """How many LoRA adapters it takes."""
    adapter_ms: float = 0
    """Time that taking one takes."""
    refuse_adapter: str | None = None
    """An adapter of this name is refused."""
    refuse_start: bool = False
    echo: bool = False
    """Answer with the prompt itself, then stop."""
    media: dict[str, int] = {}
    """How many of each kind of media it takes; each has three tokens before the prompt."""
    builds_lazily: bool = False


def parse_spec(text: str | None) -> FakeSpec:
    try:
        return msgspec.json.decode(text or "{}", type=FakeSpec)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"--fake-engine: {exc}") from None
