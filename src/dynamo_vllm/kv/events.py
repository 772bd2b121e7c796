"""Relays vLLM's KV events to the router: one publisher per data-parallel rank."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynamo._core import resolve_routing_image_token_id
from dynamo.llm import KvEventPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo.runtime import Endpoint

    from dynamo_vllm.job import EngineFacts


@contextmanager
def publishers(endpoint: Endpoint, facts: EngineFacts, local_indexer: bool, model: str) -> Iterator[int]:
    """Publish while the block runs; yield the number of publishers."""
    made: list[KvEventPublisher] = []
    image_token_id = _image_token(facts, model)
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
                    image_token_id=image_token_id,
                )
            )
        yield len(made)
    finally:
        for publisher in made:
            publisher.shutdown()


def _image_token(facts: EngineFacts, model: str) -> int | None:
    """Return the placeholder token of an image; None if the frontend does not know the model family.

    The frontend replaces these tokens by an image's hash when it looks for cached prefixes, and the publisher
    does the same in events. Both use the same code.
    """
    return resolve_routing_image_token_id(model, model) if facts.media else None
