"""Makes vLLM's KV events mean to the router what they should. Four patches, in the engine core.

What is wrong in the events of vLLM 0.30, as the runtime's listener (1.6.1) reads them:

- Adapters: the adapter's name stands in a field of its own and again among the block's extra keys, where the
  listener takes it for something else: no request for an adapter is ever sent where its prefix is cached. And
  a name that had other content before (`lora.registry`) has an ending that the router, which hashes with the
  client's name, does not know.
- Salts: without a mark before it a salt is for the listener one more key that says nothing: the blocks would
  count for those who did not ask with the salt, and not for those who did. vLLM names it with a prompt's
  first block only, and a long prompt is told in several events.
- Media: a picture's name in the engine is one of its content (`roles.media`). The frontend knows only the
  picture's URL; where it sent a hash of that, it stands before the name, and must stand alone in what is told
  to the router.
- Embeddings: a block of prompt embeddings is named by a hash of its rows, as bytes. The listener cannot read
  bytes there and drops the whole batch of events: blocks of other requests in it are then never found, or
  never forgotten. And the token ids are zeros: all embeddings, and a prompt of zeros, look alike to the
  router.

What we do: change each event when vLLM has built it. The hash of embeddings stands in the place of the zeros.

They can go one by one when vLLM and the listener agree on what the keys of a block say.
"""

from __future__ import annotations

import functools
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches.patch import Where, in_vllm, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.block_pool import BlockPool

    from dynamo_vllm.engine.vllm.names import BlockStored, CachedRequest

    Change = Callable[[BlockStored, CachedRequest, int], BlockStored]

ROUTED = "-"
"""Behind the frontend's name for a picture, in ours."""
ROUTING_NAME_LENGTH = 64
"""The listener (1.6.1) takes 16 hex digits and so many zeros for such a name."""
SALT_MARK = "dynamo-cache-salt:"
"""As the runtime's listener (1.6.1) spells it."""


# --- what is changed --------------------------------------------------------------------------------------


def _adapters(event: BlockStored, request: CachedRequest, start: int) -> BlockStored:
    return event if request.lora_request is None else of_adapter(event)


def _salts(event: BlockStored, request: CachedRequest, start: int) -> BlockStored:
    return of_salt(event, request.cache_salt) if request.cache_salt else event


def _media(event: BlockStored, request: CachedRequest, start: int) -> BlockStored:
    return of_media(event) if request.mm_features else event


def _embeds(event: BlockStored, request: CachedRequest, start: int) -> BlockStored:
    return event if request.prompt_embeds is None else named(event, len(request.prompt_embeds), start)


_ORDER = (_adapters, _salts, _media, _embeds)
_changes: list[Change] = []
"""Those that are applied: vLLM's function is wrapped once for all of them, as it is called often."""


def apply_adapters() -> None:
    _apply(_adapters)


def apply_salts() -> None:
    _apply(_salts)


def apply_media() -> None:
    _apply(_media)


def apply_embeds() -> None:
    _apply(_embeds)


def _apply(change: Change) -> None:
    from vllm.v1.core.block_pool import BlockPool

    if change not in _changes:
        _changes[:] = [known for known in _ORDER if known is change or known in _changes]
    wrap(BlockPool, "_build_block_stored_event", _changed)


def _changed(build: Callable[..., BlockStored]) -> Callable[..., BlockStored]:
    def build_block_stored_event(pool: BlockPool, request: CachedRequest, **more: Any) -> BlockStored:
        event = build(pool, request, **more)
        # Most requests have none of these; asked here, they cost no calls.
        if (
            request.lora_request is not None
            or request.cache_salt
            or request.mm_features
            or request.prompt_embeds is not None
        ):
            for change in _changes:
                event = change(event, request, more["start_token_idx"])
        return event

    return build_block_stored_event


# --- whether vLLM's keys are still those that we change ---------------------------------------------------


def _keys(start: int = 0, **about: object) -> tuple[object, ...]:
    """The extra keys that vLLM tells of a block of two tokens. Since 0.31 those of its hash have marks."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    try:
        from vllm.v1.core.kv_cache_utils import to_event_extra_keys as told
    except ImportError:
        told = list  # vLLM 0.30

    plain: dict[str, object] = {
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    request = SimpleNamespace(**plain | about, _prompt_embeds_per_block_hashes={})
    keys, _ = generate_block_hash_extra_keys(request, start, start + 2, 0)
    return told([keys])[0] or ()


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


# --- how ------------------------------------------------------------------------------------------------


def of_adapter(event: BlockStored) -> BlockStored:
    """The event with the client's name for the adapter, once."""
    plain = [tuple(key for key in keys or () if key != event.lora_name) for keys in event.extra_keys or ()]
    event.extra_keys = [keys or None for keys in plain] if any(plain) else None
    event.lora_name = event.lora_name and event.lora_name.partition("#")[0]
    return event


def of_salt(event: BlockStored, salt: str) -> BlockStored:
    """The event with the salt marked, once: its first block speaks for all."""
    blocks = event.extra_keys or [None] * (len(event.token_ids) // event.block_size)
    keys = [tuple(key for key in block_keys or () if key != salt) for block_keys in blocks]
    keys[0] = (*keys[0], SALT_MARK + salt)
    event.extra_keys = [block_keys or None for block_keys in keys]
    return event


def of_media(event: BlockStored) -> BlockStored:
    """The event with the frontend's names for pictures, where they have one."""
    event.extra_keys = [
        keys and tuple(_for_router(key) for key in keys) for keys in event.extra_keys or ()
    ] or None
    return event


def _for_router(key: object) -> object:
    match key:
        case (str() as name, offset) if ROUTED in name:
            return name.partition(ROUTED)[0].ljust(ROUTING_NAME_LENGTH, "0"), offset
    return key


def named(event: BlockStored, rows: int, start: int) -> BlockStored:
    """The event with a hash of the rows for token ids, where there are rows, and no bytes among its keys."""
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


_in_events = functools.partial(
    in_vllm, targets=("vllm.v1.core.block_pool.BlockPool._build_block_stored_event",), where=(Where.ENGINE,)
)
PATCHES = (
    _in_events(
        name="kv-events-adapters",
        defect="the name of an adapter stands among a block's extra keys too, where the router misreads it",
        apply=apply_adapters,
        still_needed=adapters_are_keys,
    ),
    _in_events(
        name="kv-events-salts",
        defect="a salt has no mark that the router knows, and only a prompt's first block has it",
        apply=apply_salts,
        still_needed=salts_are_plain_keys_of_the_first_block,
    ),
    _in_events(
        name="kv-events-media",
        defect="a picture has the engine's name in events; the router knows the frontend's",
        apply=apply_media,
        still_needed=media_are_named_as_in_the_engine,
    ),
    _in_events(
        name="kv-events-embeds",
        defect="prompt embeddings are named by bytes, for which the router drops the whole batch of events",
        apply=apply_embeds,
        still_needed=embeds_are_named_by_bytes,
    ),
)
