"""Tests the KV events of blocks in tiers: they say of a block what those of the engine's own cache say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadingKVEventsConfig, make_offload_key

from dynamo_vllm.engine.patches import kv_events

BLOCK, BLOCKS, CHUNK = 2, 2, 1
GROUP = SimpleNamespace(
    group_idx=0,
    hashes_per_chunk=BLOCKS,
    tokens_per_chunk=BLOCK * BLOCKS,
    tokens_per_block=BLOCK,
    sliding_window_size_in_chunks=None,
    kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
)
HASHES = [bytes([number]) * 32 for number in range(BLOCKS * (CHUNK + 1))]


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> OffloadingEventsTracker:
    kv_events.apply_tiers()  # once: another test of this process may have done it
    monkeypatch.setattr(kv_events, "_changes", list(kv_events._ORDER))
    return OffloadingEventsTracker(
        OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)
    )


def event(tracker: OffloadingEventsTracker, **about: object) -> Any:
    """Returns the event of the second chunk of a prompt, which has two blocks."""
    plain: dict[str, object] = {
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    request = SimpleNamespace(
        **plain | about,
        block_hashes=HASHES,
        all_token_ids=list(range(BLOCK * BLOCKS * (CHUNK + 1))),
        _prompt_embeds_per_block_hashes={},
    )
    key = make_offload_key(HASHES[-1], 0)
    tracker.record_store(request, GROUP, CHUNK, key)
    (made,) = tracker.take_events([OffloadingEvent(keys=[key], medium=Medium.CPU, removed=False)])
    return made


def test_plain_prompt_has_no_keys_and_a_salt_is_in_every_chunk(tracker: OffloadingEventsTracker) -> None:
    made = event(tracker)
    assert (made.extra_keys, made.lora_name, made.token_ids) == (None, None, [4, 5, 6, 7])
    assert event(tracker, cache_salt="mine").extra_keys == [("dynamo-cache-salt:mine",), None]


def test_adapter_has_the_clients_name(tracker: OffloadingEventsTracker) -> None:
    adapter = SimpleNamespace(adapter_id=1, name="sql#12ab", lora_name="sql#12ab", lora_path="/sql")
    made = event(tracker, lora_request=adapter)
    assert (made.lora_name, made.extra_keys) == ("sql", None)


def test_image_has_the_frontends_name(tracker: OffloadingEventsTracker) -> None:
    place = SimpleNamespace(offset=5, length=2)
    image = SimpleNamespace(identifier=f"{'ab' * 8}{kv_events.ROUTED}content", mm_position=place)
    name = ("ab" * 8).ljust(kv_events.ROUTING_NAME_LENGTH, "0")
    assert event(tracker, mm_features=[image]).extra_keys == [((name, 1),), ((name, -1),)]


def test_embeddings_are_told_apart(tracker: OffloadingEventsTracker) -> None:
    made = [event(tracker, prompt_embeds=torch.full((8, 1), value)) for value in (1.0, 2.0)]
    assert made[0].token_ids != made[1].token_ids
    assert [one.extra_keys for one in made] == [None, None]
