"""Lists the roles by name, and how to create each; `config.role_cards` has their cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.roles import aggregated, decode, encode, pooling, prefill, transcription
from dynamo_vllm.roles.media import MediaReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.config.role_cards import RoleCard
    from dynamo_vllm.engine.base import EngineParts
    from dynamo_vllm.engine.encoder_cache.folder import Folder
    from dynamo_vllm.job import EngineFacts
    from dynamo_vllm.kv.connectors.base import Connector
    from dynamo_vllm.media.base import MediaLoader
    from dynamo_vllm.roles.base import Role
    from dynamo_vllm.roles.media import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleParts:
    """The parts for creating roles; each takes what it needs."""

    facts: EngineFacts
    engine: EngineParts
    names: Sequence[str]
    """Of the model, as clients call it."""
    media_reader: Reader
    loader: MediaLoader | None
    max_items: int
    connector: Connector | None
    on_lost_transfer: Callable[[], None]
    encoded: Folder | None
    """The folder of encode workers; None for other workers, and with a connector that is not ours."""
    local_prefill_tokens: int
    aggregated_card: RoleCard = aggregated.CARD
    """The card of an aggregated worker."""


def _aggregated(parts: RoleParts) -> Role[Any]:
    return aggregated.Aggregated(parts.facts, parts.engine.embeds, parts.media_reader, parts.aggregated_card)


def _prefill(parts: RoleParts) -> Role[Any]:
    return prefill.Prefill(
        parts.facts, parts.connector, parts.local_prefill_tokens, parts.engine.embeds, parts.media_reader
    )


def _decode(parts: RoleParts) -> Role[Any]:
    return decode.Decode(
        parts.facts, parts.connector, parts.on_lost_transfer, parts.engine.embeds, parts.media_reader
    )


def _encode(parts: RoleParts) -> Role[Any]:
    assert isinstance(parts.media_reader, MediaReader)  # a rule sees to it
    return encode.Encode(parts.facts, parts.media_reader, parts.encoded)


def _pooling(parts: RoleParts) -> Role[Any]:
    assert parts.engine.pooling is not None  # an engine of a pooling model has it
    return pooling.Pooling(
        parts.facts, parts.engine.pooling, parts.names, parts.media_reader, max_items=parts.max_items
    )


def _transcription(parts: RoleParts) -> Role[Any]:
    assert parts.engine.speech is not None  # an engine of a speech model has it
    return transcription.Transcription(parts.facts, parts.engine.speech, parts.names, parts.loader)


MAKERS: Mapping[str, Callable[[RoleParts], Role[Any]]] = {
    "agg": _aggregated,
    "prefill": _prefill,
    "decode": _decode,
    "encode": _encode,
    "pooling": _pooling,
    "transcription": _transcription,
}
