"""Tests the KV events of blocks with prompt embeddings, an adapter, a salt or media."""

from __future__ import annotations

import hashlib
import struct
from types import SimpleNamespace
from typing import Any

from dynamo_vllm.engine.patches.kv_events import fix_adapter, fix_embeds, fix_media, fix_salt

BLOCK = 16


def key(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def words(number: int) -> list[int]:
    return list(struct.unpack("<8I", key(number)))


def event(ids: list[int], *keys: tuple[Any, ...] | None) -> Any:
    return SimpleNamespace(token_ids=ids, block_size=BLOCK, extra_keys=list(keys))


def test_hash_replaces_the_zeros() -> None:
    found = fix_embeds(event([0] * 32, (key(1),), (key(2),)), 40, 0)
    assert found.token_ids == [*words(1), *[0] * 8, *words(2), *[0] * 8]
    assert found.extra_keys is None


def test_tokens_of_the_answer_stay() -> None:
    found = fix_embeds(event([0] * 3 + [7] * 13, (key(1),)), 35, 32)
    assert found.token_ids == [*words(1)[:3], *[7] * 13]
    behind = fix_embeds(event([7] * 16, (key(1),)), 35, 48)
    assert behind.token_ids == [7] * 16


def test_other_keys_stay() -> None:
    found = fix_embeds(event([0] * 32, ("adapter", key(1)), (key(2),)), 40, 0)
    assert found.extra_keys == [("adapter",), None]


def test_adapter_is_named_once_and_as_clients_do() -> None:
    made = event([5] * 32, ("sql#2", "salt"), ("sql#2",))
    made.lora_name = "sql#2"
    found = fix_adapter(made)
    assert (found.lora_name, found.extra_keys) == ("sql", [("salt",), None])
    made = event([5] * 32, ("sql",), ("sql",))
    made.lora_name = "sql"
    assert fix_adapter(made).extra_keys is None


def test_salt_is_marked_once_in_every_event_of_a_prompt() -> None:
    marked = "dynamo-cache-salt:mine"
    later = event([5] * 32)
    later.extra_keys = None
    adapted = event([5] * 32, ("sql", "mine"), ("sql",))
    adapted.lora_name = "sql"
    first, second = event([5] * 32, ("mine",), None), event([5] * 32, None, None)
    for made in (first, second, later, fix_adapter(adapted)):
        assert fix_salt(made, "mine").extra_keys == [(marked,), None]


def test_image_has_the_frontends_name_if_it_has_one() -> None:
    own = "f" * 64
    routed = [(f"{'ab' * 8}-{own}", 3), (f"{'ab' * 8}-{own}", -29), (own, 0)]
    found = fix_media(event([7] * 48, (routed[0],), ("salt", routed[1], routed[2]), None))
    name = "ab" * 8 + "0" * 48
    assert found.extra_keys == [((name, 3),), ("salt", (name, -29), (own, 0)), None]
    assert [at for at in range(48) if found.token_ids[at] != 7] == [16], "only that without its name"


def test_image_without_the_frontends_name_changes_a_token_in_each_of_its_blocks() -> None:
    def ids(own: str) -> list[int]:
        found: list[int] = fix_media(event([7] * 48, None, ((own, 3),), ((own, -13),))).token_ids
        return found

    one, other = ids("a" * 64), ids("b" * 64)
    assert [at for at in range(48) if one[at] != 7] == [at for at in range(48) if other[at] != 7] == [19, 32]
    assert not {one[19], one[32]} & {other[19], other[32]}
    assert max(*one, *other) < 2**32


def test_prompt_without_keys_stays_without() -> None:
    assert fix_media(SimpleNamespace(token_ids=[7], block_size=BLOCK, extra_keys=None)).extra_keys is None
