"""Describes a worker to processes that call it without the frontend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.config.role_cards import RoleCard
    from dynamo_vllm.job import EngineFacts


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker says of itself."""

    instance: int = 0
    """The number of its process in discovery, the same for all of its endpoints."""
    address: str = ""
    """Where it answers requests: namespace.component.endpoint."""
    kind: str = "generate"
    """generate, pooling or transcription."""
    apis: tuple[str, ...] = ()
    """The endpoints for clients: chat, embeddings, score …; a worker that helps others has none."""
    models: tuple[str, ...] = ()
    """Names of its model and of its adapters."""
    max_model_len: int = 0
    converts: bool = True
    """Whether it converts between text and tokens."""
    task: str | None = None
    """What a pooling model computes: embed, classify, token_embed or token_classify."""
    dimensions: int | None = None
    """Length of an embedding."""


def card_of(
    role: RoleCard, facts: EngineFacts, apis: Sequence[str], address: str, instance: int
) -> WorkerCard:
    """Return a card without the names, which change while adapters come and go."""
    pooling = facts.pooling
    return WorkerCard(
        instance=instance,
        address=address,
        kind=role.kind,
        apis=tuple(apis),
        max_model_len=facts.context_length,
        task=None if pooling is None else pooling.task,
        dimensions=pooling.dimensions if pooling and pooling.task.endswith("embed") else None,
    )
