"""Computes the runtime's sequence hashes of KV blocks."""

from __future__ import annotations

from dynamo.llm import compute_block_hash_for_seq

_LOW = 0xFFFFFFFF


def chain(before: int, block: int) -> int:
    """Return the sequence hash of a block, from that of the block before it and from its own hash.

    It is the runtime's hash over both numbers, eight bytes each, which is also that of a block of four
    tokens with these bytes. The sequence hash of a first block is its own hash.
    """
    halves = [before & _LOW, before >> 32, block & _LOW, block >> 32]
    found: int = compute_block_hash_for_seq(halves, len(halves))[0]
    return found
