"""Changes vLLM's KV events so that the router computes the right block hashes. Five patches.

What is wrong in the events of vLLM 0.30, as the runtime's KV event listener (1.6.1) reads them:

- Adapters: the adapter's name is in a field of its own and also among the block's extra keys, where the
  listener misreads it. So the router never finds the cached prefix of a request for an adapter. A name that
  had other content before (`lora.registry`) also has a suffix, but the router hashes the client's name.
- Salts: the listener ignores a cache salt without its prefix. Then the blocks match requests without the
  salt, and not those with it. vLLM puts the salt only on a prompt's first block, and a long prompt has
  several events.
- Media: the engine names an image by a hash of its content (`roles.media`). The frontend knows only the URL.
  If it sent a hash of the URL, that hash is a prefix of the name, and the router needs only the prefix.
  If not (other model families, video, audio), placeholders are all that the listener looks at: prompts with
  other media look alike, it keeps the blocks of the first one, and later events find no parent.
- Embeddings: a block of prompt embeddings is named by a hash of its rows, as bytes. The listener cannot read
  bytes there and drops the whole batch of events. Blocks of other requests in the batch are then never found,
  or never removed. The token ids are zeros, so all prompt embeddings look alike to the router.
- Tiers: events of blocks in host memory and on disk have no extra keys at all. Then the blocks match requests
  without the salt, image or embeddings, and not those with them; and an adapter's name keeps its suffix.

What we do: change each event after vLLM has built it. The hash of embeddings replaces the zeros, and a hash
of an unknown item's name one placeholder per block. Events of tiers get the keys first.

They can go one by one when vLLM and the listener agree on the keys of a block.
"""

from __future__ import annotations

import functools
import struct
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches.patch import Where, in_vllm, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig
    from vllm.v1.core.block_pool import BlockPool

    from dynamo_vllm.engine.vllm.names import BlockStored, CachedRequest

    Change = Callable[[BlockStored, CachedRequest, int], BlockStored]

ROUTED = "-"
"""Separates the frontend's hash of an image's URL from our hash of its content, in the engine's name."""
ROUTING_NAME_LENGTH = 64
"""The length of such a hash in events: the listener (1.6.1) expects 16 hex digits, padded with zeros."""
SALT_MARK = "dynamo-cache-salt:"
"""The prefix of a cache salt that the runtime's listener (1.6.1) expects."""


# --- what is changed --------------------------------------------------------------------------------------


def _adapters(event: BlockStored, request: CachedRequest, start: int) -> BlockStored:
    return event if request.lora_request is None else fix_adapter(event)


def _salts(event: BlockStored, request: CachedRequest, start: int) -> BlockStored:
    return fix_salt(event, request.cache_salt) if request.cache_salt else event


def _media(event: BlockStored, request: CachedRequest, start: int) -> BlockStored:
    return fix_media(event) if request.mm_features else event


def _embeds(event: BlockStored, request: CachedRequest, start: int) -> BlockStored:
    return event if request.prompt_embeds is None else fix_embeds(event, len(request.prompt_embeds), start)


_ORDER = (_adapters, _salts, _media, _embeds)
_changes: list[Change] = []
"""The applied changes. vLLM's function is called often, so it is wrapped once for all of them."""


def apply_adapters() -> None:
    _apply(_adapters)


def apply_salts() -> None:
    _apply(_salts)


def apply_media() -> None:
    _apply(_media)


def apply_embeds() -> None:
    _apply(_embeds)


def apply_tiers() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker

    wrap(OffloadingEventsTracker, "_build_event_metadata", _described)


def _apply(change: Change) -> None:
    from vllm.v1.core.block_pool import BlockPool

    if change not in _changes:
        _changes[:] = [known for known in _ORDER if known is change or known in _changes]
    wrap(BlockPool, "_build_block_stored_event", _changed)


def _changed(build: Callable[..., BlockStored]) -> Callable[..., BlockStored]:
    def build_block_stored_event(pool: BlockPool, request: CachedRequest, **more: Any) -> BlockStored:
        event = build(pool, request, **more)
        if _has_keys(request):
            for change in _changes:
                event = change(event, request, more["start_token_idx"])
        return event

    return build_block_stored_event


def _described(build: Callable[..., BlockStored]) -> Callable[..., BlockStored]:
    """Wraps the function that notes, in the fields of BlockStored, what events of a tier's chunk will say."""

    def build_event_metadata(
        tracker: OffloadingEventsTracker, request: CachedRequest, group: GroupOffloadConfig, chunk: int
    ) -> BlockStored:
        noted = build(tracker, request, group, chunk)
        if _has_keys(request):
            start = chunk * group.tokens_per_chunk
            noted.extra_keys = _event_keys(request, start, start + group.tokens_per_chunk, noted.block_size)
            for change in _changes:
                noted = change(noted, request, start)
            noted.extra_keys = noted.extra_keys and [keys and _tagged(keys) for keys in noted.extra_keys]
        return noted

    return build_event_metadata


def _has_keys(request: CachedRequest) -> bool:
    """Most requests have none of these; the check saves four calls per event."""
    return (
        request.lora_request is not None
        or bool(request.cache_salt)
        or bool(request.mm_features)
        or request.prompt_embeds is not None
    )


# --- whether vLLM's keys are still those that we change ---------------------------------------------------


def _event_keys(
    request: object, start: int, end: int, block_size: int
) -> list[tuple[object, ...] | None] | None:
    """Returns the extra keys in vLLM's event for these tokens.

    Since 0.31 vLLM hashes tagged keys, and removes the tags for its events.
    """
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    keys = [
        generate_block_hash_extra_keys(request, at, at + block_size, 0)[0]
        for at in range(start, end, block_size)
    ]
    untag = _untagging()
    return untag(keys) if untag is not None else keys


def _tagged(keys: tuple[object, ...]) -> tuple[object, ...]:
    """Puts tags on keys, as vLLM notes them for the events of tiers."""
    if _untagging() is None:
        return keys
    return tuple(("mm", *key) if isinstance(key, tuple) else ("", key) for key in keys)


@functools.cache
def _untagging() -> Callable[..., Any] | None:
    """Returns vLLM's function that removes tags; None for vLLM 0.30, which has none."""
    from vllm.v1.core import kv_cache_utils

    return getattr(kv_cache_utils, "to_event_extra_keys", None)


def _keys(start: int = 0, **about: object) -> tuple[object, ...]:
    """Returns the extra keys in vLLM's event for a block of two tokens."""
    plain: dict[str, object] = {
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    request = SimpleNamespace(**plain | about, _prompt_embeds_per_block_hashes={})
    found = _event_keys(request, start, start + 2, 2)
    return (found and found[0]) or ()


def adapters_are_keys() -> bool:
    return _keys(lora_request=SimpleNamespace(lora_name="adapter", lora_path="/adapter")) == ("adapter",)


def salts_are_plain_keys_of_the_first_block() -> bool:
    return _keys(cache_salt="salt") == ("salt",) and _keys(start=2, cache_salt="salt") == ()


def media_are_named_as_in_the_engine() -> bool:
    feature = SimpleNamespace(
        identifier=f"url{ROUTED}content", mm_position=SimpleNamespace(offset=0, length=2)
    )
    return _keys(mm_features=[feature]) == ((f"url{ROUTED}content", 0),)


def embeds_are_named_by_bytes() -> bool:
    import torch

    return any(isinstance(key, bytes) for key in _keys(prompt_embeds=torch.zeros(2, 1)))


def events_of_tiers_have_no_keys() -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker

    return "extra_keys=None" in source(OffloadingEventsTracker._build_event_metadata)


# --- how ------------------------------------------------------------------------------------------------


def fix_adapter(event: BlockStored) -> BlockStored:
    """Puts the client's name of the adapter into the event, only once."""
    plain = [tuple(key for key in keys or () if key != event.lora_name) for keys in event.extra_keys or ()]
    event.extra_keys = [keys or None for keys in plain] if any(plain) else None
    event.lora_name = event.lora_name and event.lora_name.partition("#")[0]
    return event


def fix_salt(event: BlockStored, salt: str) -> BlockStored:
    """Puts the salt with its prefix on the first block of the event, which counts for all of its blocks."""
    blocks = event.extra_keys or [None] * (len(event.token_ids) // event.block_size)
    keys = [tuple(key for key in block_keys or () if key != salt) for block_keys in blocks]
    keys[0] = (*keys[0], SALT_MARK + salt)
    event.extra_keys = [block_keys or None for block_keys in keys]
    return event


def fix_media(event: BlockStored) -> BlockStored:
    """Replaces the names of media by the frontend's; if it sent none, a token tells prompts apart."""
    ids = list(event.token_ids)
    for number, keys in enumerate(event.extra_keys or ()):
        for key in keys or ():
            match key:
                case (str() as name, int() as offset) if ROUTED not in name:
                    ids[number * event.block_size + max(0, offset)] = zlib.crc32(name.encode())
    event.token_ids = ids
    event.extra_keys = [
        keys and tuple(_for_router(key) for key in keys) for keys in event.extra_keys or ()
    ] or None
    return event


def _for_router(key: object) -> object:
    match key:
        case (str() as name, offset) if ROUTED in name:
            return name.partition(ROUTED)[0].ljust(ROUTING_NAME_LENGTH, "0"), offset
    return key


def fix_embeds(event: BlockStored, rows: int, start: int) -> BlockStored:
    """Replaces the token ids of embeddings by a hash of the rows, and removes bytes from the keys."""
    keys = [list(keys or ()) for keys in event.extra_keys or ()]
    size, ids = event.block_size, list(event.token_ids)
    for number, block_keys in enumerate(keys):
        first = number * size
        count = min(size, rows - start - first)
        words = [word for key in block_keys if isinstance(key, bytes) for word in struct.unpack("<8I", key)]
        for at in range(min(count, len(words))):
            ids[first + at] = words[at]
    event.token_ids = ids
    plain = [tuple(key for key in block_keys if not isinstance(key, bytes)) for block_keys in keys]
    event.extra_keys = [block_keys or None for block_keys in plain] if any(plain) else None
    return event


_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_in_events = functools.partial(
    in_vllm, targets=("vllm.v1.core.block_pool.BlockPool._build_block_stored_event",), where=(Where.ENGINE,)
)
PATCHES = (
    _in_events(
        name="kv-events-adapters",
        defect="the name of an adapter is also among a block's extra keys, where the router misreads it",
        apply=apply_adapters,
        still_needed=adapters_are_keys,
    ),
    _in_events(
        name="kv-events-salts",
        defect="a cache salt lacks the prefix that the router expects, and only the first block has it",
        apply=apply_salts,
        still_needed=salts_are_plain_keys_of_the_first_block,
    ),
    _in_events(
        name="kv-events-media",
        defect="events name media as the engine does; the router knows only the frontend's name of an image",
        apply=apply_media,
        still_needed=media_are_named_as_in_the_engine,
    ),
    _in_events(
        name="kv-events-embeds",
        defect="prompt embeddings are named by bytes, so the router drops the whole batch of events",
        apply=apply_embeds,
        still_needed=embeds_are_named_by_bytes,
    ),
    in_vllm(
        name="kv-events-tiers",
        defect="events of blocks in host memory and on disk have no extra keys, so the router misreads them",
        targets=(f"{_OFFLOADING}.events.OffloadingEventsTracker._build_event_metadata",),
        where=(Where.TIERS,),
        apply=apply_tiers,
        still_needed=events_of_tiers_have_no_keys,
    ),
)
