"""Makes KV events about adapters, salts and prompt embeddings mean to the router what they should.

Runs in vLLM's engine core. An adapter's name stands in a field of its own and again among the block's extra
keys, where the runtime's listener (1.6.1) takes it for something else: no request for an adapter was ever
sent where its prefix is cached. And a name that had other content before (`lora.registry`) has an ending that
the router, which hashes with the client's name, does not know.

A salt is for the listener one more key that says nothing, unless it has a mark before it: the blocks would
count for those who did not ask with the salt, and not for those who did. vLLM names it with a prompt's first
block only, and a long prompt is told in several events.

A picture's name in the engine is one of its content (`roles.media`). The frontend knows only the picture's
URL; where it sent a hash of that, it stands before the name, and alone in what is told to the router.

A block of prompt embeddings is named by a hash of its rows, as bytes. The listener cannot read bytes there
and drops the whole batch of events: blocks of other requests in it are then never found, or never forgotten.
And the token ids are zeros: all embeddings, and a prompt of zeros, look alike to the router. Here the hash
stands in the place of the zeros.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

_MENDED = "dynamo_vllm_mended"
ROUTED = "-"
"""Behind the frontend's name for a picture, in ours."""
ROUTING_NAME_LENGTH = 64
"""The listener (1.6.1) takes 16 hex digits and so many zeros for such a name."""
SALT_MARK = "dynamo-cache-salt:"
"""As the runtime's listener (1.6.1) spells it."""


def mend() -> None:
    """Once in each process; what is forked from it has it too."""
    from vllm.v1.core.block_pool import BlockPool

    build = BlockPool._build_block_stored_event
    if hasattr(build, _MENDED):
        return

    @functools.wraps(build)
    def mended(pool: Any, request: Any, **more: Any) -> Any:
        event = build(pool, request, **more)
        if request.lora_request is not None:
            event = of_adapter(event)
        if request.cache_salt:
            event = of_salt(event, request.cache_salt)
        if request.mm_features:
            event = of_media(event)
        return event if request.prompt_embeds is None else named(event, request, more["start_token_idx"])

    setattr(mended, _MENDED, True)
    BlockPool._build_block_stored_event = mended


def of_adapter(event: Any) -> Any:
    """The event with the client's name for the adapter, once."""
    plain = [tuple(key for key in keys or () if key != event.lora_name) for keys in event.extra_keys or ()]
    event.extra_keys = [keys or None for keys in plain] if any(plain) else None
    event.lora_name = event.lora_name.partition("#")[0]
    return event


def of_salt(event: Any, salt: str) -> Any:
    """The event with the salt marked, once: its first block speaks for all."""
    blocks = event.extra_keys or [None] * (len(event.token_ids) // event.block_size)
    keys = [tuple(key for key in block_keys or () if key != salt) for block_keys in blocks]
    keys[0] = (*keys[0], SALT_MARK + salt)
    event.extra_keys = [block_keys or None for block_keys in keys]
    return event


def of_media(event: Any) -> Any:
    """The event with the frontend's names for pictures, where they have one."""
    event.extra_keys = [
        keys and tuple(_for_router(key) for key in keys) for keys in event.extra_keys or ()
    ] or None
    return event


def _for_router(key: Any) -> Any:
    match key:
        case (str() as name, offset) if ROUTED in name:
            return name.partition(ROUTED)[0].ljust(ROUTING_NAME_LENGTH, "0"), offset
    return key


def named(event: Any, request: Any, start: int) -> Any:
    """The event with a hash of the rows for token ids, where there are rows, and no bytes among its keys."""
    keys = [list(keys or ()) for keys in event.extra_keys or ()]
    size, rows, ids = event.block_size, len(request.prompt_embeds), list(event.token_ids)
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
