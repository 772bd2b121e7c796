"""What is kept, and what goes."""

from __future__ import annotations

from PIL import Image

from dynamo_vllm.media.base import MediaItem
from dynamo_vllm.media.cache import MediaCache


def item(key: str, size: int) -> MediaItem:
    return MediaItem("image", Image.new("RGB", (1, 1)), key, size)


def test_least_recently_used_goes_first() -> None:
    cache = MediaCache(100)
    for key in "ab":
        cache.put(item(key, 40))
    assert cache.get("a") is not None
    cache.put(item("c", 40))
    assert cache.get("b") is None
    assert cache.get("a") is not None and cache.get("c") is not None
    assert cache.bytes == 80


def test_item_larger_than_the_cache_throws_nobody_out() -> None:
    cache = MediaCache(100)
    cache.put(item("a", 40))
    cache.put(item("b", 101))
    assert cache.get("a") is not None and cache.get("b") is None
    nothing = MediaCache(0)
    nothing.put(item("a", 1))
    assert len(nothing) == 0


def test_same_key_counts_once_and_hits_and_misses_are_counted() -> None:
    cache = MediaCache(100)
    cache.get("a")
    for _ in range(2):
        cache.put(item("a", 40))
    cache.get("a")
    assert (len(cache), cache.bytes, cache.hits, cache.misses) == (1, 40, 1, 1)
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)
