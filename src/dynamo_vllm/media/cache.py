"""A cache of decoded media by content, with a byte limit and least-recently-used eviction."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_vllm.media.base import MediaItem


class MediaCache:
    """Used in the event loop only. The key is the content alone: results of a URL are not remembered."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[str, MediaItem] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: str) -> MediaItem | None:
        item = self._items.get(key)
        if item is None:
            self.misses += 1
            return None
        self.hits += 1
        self._items.move_to_end(key)
        return item

    def put(self, item: MediaItem) -> None:
        """Skip an item larger than the whole cache: it would only evict the others."""
        if item.size > self._max_bytes or item.key in self._items:
            return
        self._items[item.key] = item
        self.bytes += item.size
        while self.bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self.bytes -= oldest.size

    def clear(self) -> None:
        self._items.clear()
        self.bytes = 0
