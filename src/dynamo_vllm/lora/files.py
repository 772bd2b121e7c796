"""Runs the first two steps of loading an adapter: download its files, and check them."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dynamo_vllm.errors import AdapterRefused, SourceFailed
from dynamo_vllm.lora import sources
from dynamo_vllm.lora.base_model import BaseModel, read_base_model
from dynamo_vllm.lora.inspect import inspect
from dynamo_vllm.lora.sources.base import SourceLimits, digest
from dynamo_vllm.lora.sources.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_vllm.lora.base import AdapterFacts, Fetched, OnProgress

logger = logging.getLogger(__name__)

FETCHES_AT_A_TIME = 4


class AdapterFiles:
    def __init__(self, cache: Path, limits: SourceLimits, max_rank: int) -> None:
        self._cache, self._limits, self._max_rank = cache, limits, max_rank
        self._base = BaseModel("", {})
        # Not the loop's own threads: the loop waits for these at its end, and a server may have stopped
        # answering.
        self._threads = ThreadPoolExecutor(FETCHES_AT_A_TIME, "adapter")

    async def start(self, base_folder: Path | None, base_name: str) -> None:
        """Reads the base model's headers and removes leftovers of interrupted downloads."""
        self._base = await asyncio.to_thread(read_base_model, base_folder, base_name)
        left = await asyncio.to_thread(Store(self._cache).clean)
        if left:
            logger.info("removed %d broken downloads from %s", left, self._cache)

    async def fetch(self, name: str, uri: str, on_progress: OnProgress) -> Fetched:
        logger.info("adapter %s: fetching %s", name, uri)
        return await sources.fetch(uri, self._cache, self._limits, on_progress, self._threads)

    async def verify(self, fetched: Fetched) -> AdapterFacts:
        """Check also that the files are still those that were fetched: a folder is used in place."""
        return await asyncio.to_thread(self._verify, fetched)

    def _verify(self, fetched: Fetched) -> AdapterFacts:
        facts = inspect(fetched.path, self._base, self._max_rank)
        try:
            now = digest(fetched.path)
        except OSError as exc:
            raise SourceFailed(f"{fetched.path}: {exc.strerror}") from exc
        if now != fetched.digest:
            raise AdapterRefused(f"the files in {fetched.path} have changed meanwhile; load it again")
        return facts
