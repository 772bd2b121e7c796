"""Relays vLLM's KV events to the router: one publisher per data-parallel rank."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynamo.llm import KvEventPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo.runtime import Endpoint

    from dynamo_vllm.job import EngineFacts


@contextmanager
def publishers(endpoint: Endpoint, facts: EngineFacts, local_indexer: bool) -> Iterator[int]:
    """Publish while the block runs; yields how many publishers there are."""
    made: list[KvEventPublisher] = []
    try:
        for rank, address in facts.kv_event_endpoints.items():
            made.append(
                KvEventPublisher(
                    endpoint,
                    kv_block_size=facts.block_size,
                    dp_rank=rank,
                    enable_local_indexer=local_indexer,
                    zmq_endpoint=address,
                    zmq_topic=facts.kv_event_topic,
                )
            )
        yield len(made)
    finally:
        for publisher in made:
            publisher.shutdown()
