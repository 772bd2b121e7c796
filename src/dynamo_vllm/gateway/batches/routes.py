"""Answers /v1/files and /v1/batches, and runs batches while the process lives."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import FileResponse
from starlette.routing import Route

from dynamo_vllm.gateway.batches import parts
from dynamo_vllm.gateway.batches.files import DAY_SECONDS, LEFT_OVER_SECONDS, PURPOSE, FileStore
from dynamo_vllm.gateway.batches.lines import ENDPOINTS
from dynamo_vllm.gateway.batches.runner import Tools
from dynamo_vllm.gateway.batches.scheduler import Scheduler
from dynamo_vllm.gateway.batches.store import BatchStore
from dynamo_vllm.gateway.exchange import answered, decoded, json_reply, order_of, read_body, whole_number
from dynamo_vllm.gateway.identity import caller_of
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.tenant_slots import TenantSlots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    import httpx
    from starlette.requests import Request
    from starlette.responses import Response

    from dynamo_vllm.gateway.batches.files import File
    from dynamo_vllm.gateway.batches.store import Batch
    from dynamo_vllm.gateway.database import Database, Transaction
    from dynamo_vllm.gateway.deferred import Gate

logger = logging.getLogger(__name__)
DAYS = 30.0
FILE_BYTES = 200_000_000
TENANT_BYTES = 2_000_000_000
CONCURRENCY = 4
FILES_TOGETHER = 2
MOST_LINES = 50_000
BEAT_SECONDS = 5.0
SWEEP_SECONDS = 600.0
BODY_BYTES = 256 << 10
"""More than all metadata, with an escape for each character."""
LONGEST_HOURS = 168
METADATA_PAIRS, METADATA_NAME_CHARACTERS, METADATA_CHARACTERS = 16, 64, 512


class _New(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class Batches:
    """The routes and what they need; `start` and `close` are for the life of the process."""

    def __init__(
        self,
        database: Database,
        frontend: httpx.AsyncClient,
        folder: Path,
        gate: Gate,
        *,
        apis: httpx.AsyncClient | None = None,
        concurrency: int = CONCURRENCY,
        busy: Callable[[], float] = lambda: 0.0,
        days: float = DAYS,
        file_bytes: int = FILE_BYTES,
        tenant_bytes: int = TENANT_BYTES,
        most_lines: int = MOST_LINES,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._database = database
        self._files = FileStore(database, folder, days=days, file_bytes=file_bytes, tenant_bytes=tenant_bytes)
        self._store = BatchStore(stale_seconds=4 * beat_seconds)
        self._days = days
        self._parts = folder / "parts"
        self._beat_seconds = beat_seconds
        tools = Tools(
            database=database,
            store=self._store,
            files=self._files,
            frontend=frontend,
            apis=apis or frontend,
            line_slots=TenantSlots(lambda: allowed(concurrency, busy())),
            file_slots=TenantSlots(lambda: FILES_TOGETHER),
            parts=self._parts,
            concurrency=concurrency,
            gate=gate,
            most_lines=most_lines,
            beat_seconds=beat_seconds,
        )
        self._scheduler = Scheduler(tools)
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> list[asyncio.Task[None]]:
        """Run batches, and forget old files, until `close`; return the loops that do."""
        loop = asyncio.get_running_loop()
        self._loops = [
            loop.create_task(_every(self._beat_seconds, self._files.beat)),
            loop.create_task(_every(SWEEP_SECONDS, self.sweep)),
        ]
        return [self._scheduler.start(), *self._loops]

    async def close(self) -> None:
        """Stop; what runs goes on in another gateway, or in the next one."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(self._scheduler.close(), *self._loops, return_exceptions=True)

    async def sweep(self) -> None:
        """Forget batches and files whose time has come, and what killed gateways left."""
        while await self._database.run(lambda t: self._store.forget(t, self._days * DAY_SECONDS)):
            pass
        await self._files.sweep()
        for folder in await asyncio.to_thread(_old_folders, self._parts):
            if not await self._database.run(lambda t, name=folder.name: self._store.is_active(t, name)):  # type: ignore[misc]
                await asyncio.to_thread(parts.remove, folder)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", answered(self._upload), methods=["POST"]),
            Route("/v1/files", answered(self._list_files), methods=["GET"]),
            Route("/v1/files/{file_id}", answered(self._get_file), methods=["GET"]),
            Route("/v1/files/{file_id}", answered(self._delete_file), methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", answered(self._content), methods=["GET"]),
            Route("/v1/batches", answered(self._create), methods=["POST"]),
            Route("/v1/batches", answered(self._list), methods=["GET"]),
            Route("/v1/batches/{batch_id}", answered(self._get), methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", answered(self._cancel), methods=["POST"]),
        ]

    async def _upload(self, request: Request) -> Response:
        return json_reply((await self._files.upload(request, caller_of(request.headers).tenant)).shown())

    async def _list_files(self, request: Request) -> Response:
        tenant, query = caller_of(request.headers).tenant, request.query_params
        limit, order = whole_number(request, "limit", 10_000, 1, 10_000), order_of(request)
        found = await self._database.run(
            lambda t: self._files.listed(t, tenant, query.get("purpose"), order, query.get("after"), limit)
        )
        return _page(found, limit)

    async def _get_file(self, request: Request) -> Response:
        return json_reply((await self._file(request)).shown())

    async def _content(self, request: Request) -> Response:
        found = await self._file(request)
        path = self._files.path(found.id)
        if not await asyncio.to_thread(path.exists):
            raise GatewayError(404, f"file {found.id!r} is not in this gateway's folder", code="not_found")
        return FileResponse(path, media_type="application/octet-stream", filename=found.name)

    async def _delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await self._files.delete(file_id, caller_of(request.headers).tenant)
        return json_reply({"id": file_id, "object": "file", "deleted": True})

    async def _create(self, request: Request) -> Response:
        new, caller = decoded(await read_body(request, BODY_BYTES), _New), caller_of(request.headers)
        if new.endpoint not in ENDPOINTS:
            raise GatewayError(400, f"endpoint is one of {', '.join(ENDPOINTS)}", parameter="endpoint")
        window = (new.completion_window, _seconds(new.completion_window))
        metadata = None if new.metadata is None else _checked_metadata(new.metadata)

        def work(t: Transaction) -> Batch:
            if self._files.get(t, new.input_file_id, caller.tenant).purpose != PURPOSE:
                raise GatewayError(400, f"the file's purpose is not {PURPOSE!r}", parameter="input_file_id")
            self._files.refuse_full(t, caller.tenant)
            return self._store.create(
                t,
                tenant=caller.tenant,
                key_id=caller.key_id,
                endpoint=new.endpoint,
                file_id=new.input_file_id,
                window=window,
                metadata=metadata,
            )

        batch = await self._database.run(work, exclusive=True)
        self._scheduler.nudge()
        return json_reply(batch.shown())

    async def _list(self, request: Request) -> Response:
        tenant, after = caller_of(request.headers).tenant, request.query_params.get("after")
        limit = whole_number(request, "limit", 20, 1, 100)
        return _page(await self._database.run(lambda t: self._store.listed(t, tenant, after, limit)), limit)

    async def _get(self, request: Request) -> Response:
        batch_id, tenant = request.path_params["batch_id"], caller_of(request.headers).tenant
        return json_reply((await self._database.run(lambda t: self._store.get(t, batch_id, tenant))).shown())

    async def _cancel(self, request: Request) -> Response:
        batch_id, tenant = request.path_params["batch_id"], caller_of(request.headers).tenant
        found = await self._database.run(lambda t: self._store.cancel(t, batch_id, tenant))
        self._scheduler.stop(batch_id)
        return json_reply(found.shown())

    async def _file(self, request: Request) -> File:
        file_id, tenant = request.path_params["file_id"], caller_of(request.headers).tenant
        return await self._database.run(lambda t: self._files.get(t, file_id, tenant))


async def _every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:
            logger.exception("files and batches cannot be kept up; trying again")
        await asyncio.sleep(seconds)


def allowed(concurrency: int, busy: float) -> int:
    """Return how many lines may run now: fewer the busier the deployment is, but always one."""
    return max(1, round(concurrency * (1.0 - min(max(busy, 0.0), 1.0))))


def _checked_metadata(metadata: dict[str, str]) -> str:
    """Return metadata as it is kept; raise GatewayError for more than OpenAI takes."""
    if len(metadata) > METADATA_PAIRS:
        message = f"metadata has {len(metadata)} pairs; it may have {METADATA_PAIRS}"
        raise GatewayError(400, message, parameter="metadata")
    for name, value in metadata.items():
        if len(name) > METADATA_NAME_CHARACTERS or len(value) > METADATA_CHARACTERS:
            raise GatewayError(
                400,
                f"metadata {name[:METADATA_NAME_CHARACTERS]!r} is too long: a name has at most"
                f" {METADATA_NAME_CHARACTERS} characters, a value {METADATA_CHARACTERS}",
                parameter="metadata",
            )
    return msgspec.json.encode(metadata).decode()


def _old_folders(folder: Path) -> list[Path]:
    """Return the folders in it into which nobody has written for some time."""
    newest: dict[Path, float] = {}
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        with suppress(OSError):
            name = folder / path.relative_to(folder).parts[0]
            newest[name] = max(newest.get(name, 0.0), path.stat().st_mtime)
    return [path for path, written in newest.items() if written < time.time() - LEFT_OVER_SECONDS]


def _page(found: Sequence[File] | Sequence[Batch], limit: int) -> Response:
    shown: list[dict[str, Any]] = [one.shown() for one in found[:limit]]
    return json_reply(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(found) > limit,
        }
    )


def _seconds(window: str) -> float:
    found = re.fullmatch(r"([1-9]\d{0,2})h", window)
    if found is None or int(found[1]) > LONGEST_HOURS:
        raise GatewayError(
            400,
            f"completion_window is a number of hours up to {LONGEST_HOURS}h",
            parameter="completion_window",
        )
    return int(found[1]) * 3600.0
