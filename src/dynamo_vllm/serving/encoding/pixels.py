"""Reads images that the frontend has decoded: the request in the model card, and the pixels over NIXL.

The frontend (1.6.1) keeps the pixels in its memory while the request runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import uuid
from typing import TYPE_CHECKING

from dynamo.llm import MediaDecoder, MediaFetcher

from dynamo_vllm.errors import EngineRequestFailed
from dynamo_vllm.media.base import MAX_CHANNELS, MEGAPIXEL

if TYPE_CHECKING:
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.media.base import Pixels
    from dynamo_vllm.serving.encoding.transfer import NixlAgent


def card(options: WorkerOptions) -> dict[str, object]:
    """Return the part of a model card that makes the frontend decode; nothing if the worker does it."""
    if not options.frontend_decoding:
        return {}
    decoder, fetcher = MediaDecoder(), MediaFetcher()
    decoder.enable_image(
        {"limits": {"max_alloc": int(options.media_max_megapixels * MEGAPIXEL) * MAX_CHANNELS}}
    )
    fetcher.timeout_ms(int(options.media_timeout_seconds * 1000))
    if options.media_hosts:
        fetcher.allowed_media_domains(list(options.media_hosts))
    return {"media_decoder": decoder, "media_fetcher": fetcher}


class FrontendPixels:
    """Reads one image at a time: each read registers the frontend with NIXL and removes it again."""

    def __init__(self, nixl: NixlAgent) -> None:
        self._nixl = nixl
        self._turn = asyncio.Lock()

    async def read(self, pixels: Pixels) -> bytes:
        from dynamo.nixl_connect import OperationKind, RdmaMetadata, SerializedDescriptor

        from dynamo_vllm.serving.encoding.transfer import described

        connector = await self._nixl.connector()
        try:
            there = RdmaMetadata(
                descriptors=[SerializedDescriptor(device="cpu", ptr=pixels.address, size=pixels.size)],
                nixl_metadata=pixels.agent,
                notification_key=uuid.uuid4().hex,
                operation_kind=int(OperationKind.READ),
            )
            async with self._turn:
                # One at a time, however many wait. In a thread, because it zeroes all of the memory.
                buffer = await asyncio.to_thread(ctypes.create_string_buffer, pixels.size)
                with await connector.begin_read(there, described(buffer)) as reading:
                    await reading.wait_for_completion()
        except Exception as exc:  # NIXL raises nothing narrower
            raise EngineRequestFailed(f"the frontend's pixels cannot be read: {exc}") from exc
        return await asyncio.to_thread(lambda: buffer.raw)  # a copy
