"""Copies encoder output over NIXL to workers that do not share the encode worker's folder.

The calling worker puts the copy into its own folder; after that everything is as with a shared folder.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.encoder_cache.folder import Unusable
from dynamo_vllm.engine.patches import nixl_pause, table
from dynamo_vllm.engine.patches.patch import Where

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo.runtime import Client

    from dynamo_vllm.engine.encoder_cache.folder import Folder
    from dynamo_vllm.serving.plane.runtime import Runtime

logger = logging.getLogger(__name__)
ENDPOINT = "lend"
FETCH_SECONDS = 20.0
"""How long a file is kept in memory for a worker that requested it."""
MAX_BYTES = 1 << 30
AT_ONCE = 8
"""Most files in memory at a time, for sending and for receiving; further ones wait."""
_PAUSE_US = 1000


def endpoint_of(address: str) -> str:
    """The endpoint of transfers next to a worker's own `address`."""
    return ".".join([*address.split(".")[:2], ENDPOINT])


class NixlAgent:
    """The NIXL agent of this process; created on first use."""

    def __init__(self) -> None:
        self._connector: Any = None

    async def connector(self) -> Any:
        if self._connector is None:
            nixl_pause.set_pause(_PAUSE_US)
            table.apply(Where.TRANSFER)
            from dynamo.nixl_connect import Connector

            self._connector = Connector()
            await self._connector.initialize()
        return self._connector


def described(buffer: Any) -> Any:
    from dynamo.nixl_connect import Descriptor, Device

    return Descriptor((ctypes.addressof(buffer), len(buffer), Device("cpu"), buffer))


class TransferServer:
    """The encode worker's side: keeps a file in memory until the caller has read it."""

    def __init__(self, folder: Folder, nixl: NixlAgent) -> None:
        self._folder = folder
        self._nixl = nixl
        self._turns = asyncio.Semaphore(AT_ONCE)

    def serve(self, drt: Runtime, address: str) -> None:
        """`address` is the worker's own: namespace.component.endpoint."""
        drt.serve(endpoint_of(address), self._serve_file, "workers cannot fetch encoder output")

    async def _serve_file(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        name = request.get("name") if isinstance(request, dict) else None
        async with self._turns:
            if context.is_stopped():
                return
            try:
                buffer = await asyncio.to_thread(self._buffer, str(name))
            except Unusable as exc:
                yield {"error": str(exc)}
                return
            connector = await self._nixl.connector()
            with await connector.create_readable(described(buffer)) as readable:
                yield {"nixl": readable.metadata().model_dump(), "size": len(buffer)}
                try:
                    async with asyncio.timeout(FETCH_SECONDS):
                        await readable.wait_for_completion()
                except TimeoutError:
                    logger.info("request %s: the encoder output was not fetched in time", context.id())

    def _buffer(self, name: str) -> Any:
        """Copy in a thread: half a gigabyte takes a fifth of a second."""
        data = self._folder.contents(name, MAX_BYTES)
        return ctypes.create_string_buffer(data, len(data))


class TransferClient:
    """The calling worker's side: fetches files that its own folder does not have."""

    def __init__(self, client: Client, folder: Folder, nixl: NixlAgent) -> None:
        self._client = client
        self._folder = folder
        self._nixl = nixl
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, instance: int, name: str, context: Any) -> None:
        """Fetch from the encode worker `instance`; raises Unusable, or what NIXL raises."""
        if self._folder.has(name):
            return
        async with self._turns:
            stream = await self._client.direct({"name": name}, instance, annotated=False, context=context)
            async for offer in stream:
                if not isinstance(offer, dict) or "nixl" not in offer:
                    raise Unusable(str(offer.get("error") if isinstance(offer, dict) else offer))
                data = await self._read(offer)
                await asyncio.to_thread(self._folder.keep, name, data)

    async def _read(self, offer: dict[str, Any]) -> memoryview:
        from dynamo.nixl_connect import RdmaMetadata

        readable, size = RdmaMetadata.model_validate(offer["nixl"]), offer.get("size")
        sizes = [descriptor.size for descriptor in readable.descriptors]
        if not isinstance(size, int) or not 0 < size <= MAX_BYTES or sizes != [size]:
            raise Unusable(f"the encode worker offers a file of invalid size: {size} bytes")
        buffer = await asyncio.to_thread(ctypes.create_string_buffer, size)  # which writes zeros into it
        connector = await self._nixl.connector()
        with await connector.begin_read(readable, described(buffer)) as reading:
            await reading.wait_for_completion()
        return memoryview(buffer)
