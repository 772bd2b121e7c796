"""Keeps files of tenants: what they say in a folder, whose they are in the database."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.gateway import kept
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.tenant_slots import TenantSlots
from dynamo_vllm.gateway.uploads import receive, seconds_for

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

    from dynamo_vllm.gateway.database import Database, Row, Transaction
    from dynamo_vllm.gateway.uploads import Received

KIND = "files"
PURPOSE = "batch"
OUTPUT = "batch_output"
DAY_SECONDS = 86400.0
LEFT_OVER_SECONDS = 86400.0
SWEPT_TOGETHER = 100
MOST_FILES = 10_000
"""Of a tenant."""
MOST_UPLOADS = 16
"""At a time in a gateway; a tenant has at most as many as are free."""
FORM_BYTES = 10_000
"""Of a form, beside its file."""
RESERVED_SECONDS = 60.0
"""How long the room of an upload outlives its gateway."""
ACTIVE = "('validating', 'in_progress', 'finalizing', 'cancelling')"
_FIELDS = "id, tenant, purpose, name, bytes, created, expires"


@dataclass(frozen=True, slots=True)
class File:
    id: str
    tenant: str
    purpose: str
    name: str
    bytes: int
    created: float
    expires: float

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Files of all tenants in one folder, which gateways that share a database should share too."""

    def __init__(
        self, database: Database, folder: Path, *, days: float, file_bytes: int, tenant_bytes: int
    ) -> None:
        self._database = database
        self._folder = folder / "files"
        self._seconds = days * DAY_SECONDS
        self._file_bytes = file_bytes
        self._tenant_bytes = tenant_bytes
        self._uploads = TenantSlots(lambda: MOST_UPLOADS, share=1)
        self._reserved: set[str] = set()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, file_id: str) -> Path:
        """`file_id` is one of ours, never a client's text."""
        return self._folder / file_id

    async def upload(self, request: Request, tenant: str) -> File:
        """Keep the file of a form; raise GatewayError for one that is too large or of another purpose."""
        if not self._uploads.try_take(tenant):
            raise GatewayError(
                429,
                "too many files are being uploaded; wait for the end of one",
                code="too_many_uploads",
                headers={"retry-after": "5"},
            )
        file_id = f"file-{secrets.token_hex(12)}"
        self._reserved.add(file_id)  # before the row is there, so that no beat misses it
        try:
            room = await self._database.run(
                lambda t: self._reserve(t, file_id, tenant, _declared_bytes(request)), exclusive=True
            )
            form = await self._receive(request, file_id, room)
            return await self._database.run(
                lambda t: self._complete(t, file_id, tenant, form.filename, form.size), exclusive=True
            )
        finally:
            self._uploads.give_back(tenant)
            self._reserved.discard(file_id)
            with suppress(Exception):  # the room comes back in a minute
                await self._database.run(lambda t: _unreserve(t, file_id))

    async def beat(self) -> None:
        """Say that the uploads of this gateway go on."""
        if self._reserved:
            file_ids = tuple(self._reserved)
            sql = "UPDATE gateway_uploads SET expires = ? WHERE file = ?"
            await self._database.run(
                lambda t: t.many(sql, [(t.now() + RESERVED_SECONDS, file_id) for file_id in file_ids])
            )

    def _reserve(self, t: Transaction, file_id: str, tenant: str, declared: int | None) -> int:
        """Return the room for a file, which is the tenant's from now on until the upload ends."""
        count = _count(t, "gateway_files", tenant) + _count(t, "gateway_uploads", tenant)
        if count >= MOST_FILES:
            message = f"the tenant has {count} of at most {MOST_FILES} files; delete some"
            raise GatewayError(400, message, code="too_many_files", parameter="file")
        room = min(self._file_bytes, self.room(t, tenant))
        if room <= 0 or (declared is not None and declared - FORM_BYTES > room):
            raise self._full(room)
        room = room if declared is None else min(room, declared)
        t.execute(
            "INSERT INTO gateway_uploads (file, tenant, bytes, expires) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (file) DO NOTHING",
            file_id,
            tenant,
            room,
            t.now() + RESERVED_SECONDS,
        )
        return room

    def room(self, t: Transaction, tenant: str) -> int:
        """Return how many bytes more the tenant may keep; a batch may have written some too many."""
        row = t.one(
            "SELECT COALESCE(SUM(bytes), 0) FROM gateway_uploads WHERE tenant = ? AND expires > ?",
            tenant,
            t.now(),
        )
        reserved = 0 if row is None else int(row[0])
        return self._tenant_bytes - kept.kept(t, tenant, KIND) - reserved

    async def _receive(self, request: Request, file_id: str, room: int) -> Received:
        """Write the file of a form into the folder, within a time that follows from its size."""
        partial = self._folder / f"{file_id}.partial"
        try:
            with partial.open("xb") as target:
                form = await receive(request, target, room, "file and purpose", seconds=seconds_for(room))
                await asyncio.to_thread(_flush, target)
            if form.one("purpose") != PURPOSE:
                raise GatewayError(400, f"purpose is {PURPOSE!r}", parameter="purpose")
            partial.rename(self.path(file_id))
            return form
        except GatewayError as exc:
            raise self._full(room) if exc.status == 413 else exc from None
        finally:
            partial.unlink(missing_ok=True)

    def _complete(self, t: Transaction, file_id: str, tenant: str, name: str, size: int) -> File:
        """Turn the reserved room into that of a file; refuse it if the room was lost and is needed."""
        has_room = _unreserve(t, file_id)
        file = self.add(t, file_id, tenant, PURPOSE, name, size)
        if not has_room and (room := self.room(t, tenant)) < 0:
            raise self._full(room + size)
        return file

    def add(self, t: Transaction, file_id: str, tenant: str, purpose: str, name: str, size: int) -> File:
        """Write down a file that is in the folder."""
        now = time.time()
        name = name.replace("\0", "")  # PostgreSQL has none in its texts
        found = File(file_id, tenant, purpose, name, size, now, now + self._seconds)
        is_new = t.execute(
            f"INSERT INTO gateway_files ({_FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
            found.id,
            found.tenant,
            found.purpose,
            found.name,
            found.bytes,
            found.created,
            found.expires,
        )
        if is_new:  # a transaction whose end nobody heard of runs again
            kept.add(t, tenant, KIND, size)
        return found

    def get(self, t: Transaction, file_id: str, tenant: str) -> File:
        """Return a file of this tenant; raise GatewayError if there is none."""
        row = (
            None
            if "\0" in file_id
            else t.one(
                f"SELECT {_FIELDS} FROM gateway_files WHERE id = ? AND tenant = ? AND expires > ?",
                file_id,
                tenant,
                time.time(),
            )
        )
        if row is None:
            raise GatewayError(404, f"there is no file {file_id!r}", code="not_found")
        return _file(row)

    def listed(
        self, t: Transaction, tenant: str, purpose: str | None, order: str, after: str | None, limit: int
    ) -> list[File]:
        """Return some files after one of them, and one more if there are more."""
        direction, sign = ("DESC", "<") if order == "desc" else ("ASC", ">")
        where, values = "tenant = ? AND expires > ?", [tenant, time.time()]
        if purpose is not None:
            if purpose not in (PURPOSE, OUTPUT):
                return []
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        if after is not None:
            last = self.get(t, after, tenant)
            where, values = f"{where} AND (created, id) {sign} (?, ?)", [*values, last.created, last.id]
        rows = t.all(
            f"SELECT {_FIELDS} FROM gateway_files WHERE {where}"
            f" ORDER BY created {direction}, id {direction} LIMIT ?",
            *values,
            limit + 1,
        )
        return [_file(row) for row in rows]

    async def delete(self, file_id: str, tenant: str) -> None:
        def work(t: Transaction) -> None:
            found = self.get(t, file_id, tenant)
            used = t.one(f"SELECT id FROM gateway_batches WHERE file_id = ? AND status IN {ACTIVE}", found.id)
            if used is not None:
                raise GatewayError(409, f"batch {used[0]} still uses this file", code="file_in_use")
            self._forget(t, found)

        await self._database.run(work, exclusive=True)  # no batch begins with the file meanwhile
        await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    async def sweep(self) -> None:
        """Forget files whose time has come, and what killed gateways left."""

        def work(t: Transaction) -> list[str]:
            rows = t.all(
                f"SELECT {_FIELDS} FROM gateway_files f WHERE expires < ? AND NOT EXISTS (SELECT 1 FROM"
                f" gateway_batches b WHERE b.file_id = f.id AND b.status IN {ACTIVE}) LIMIT ?",
                time.time(),
                SWEPT_TOGETHER,
            )
            for row in rows:
                self._forget(t, _file(row))
            return [str(row[0]) for row in rows]

        await self._database.run(
            lambda t: t.execute("DELETE FROM gateway_uploads WHERE expires < ?", t.now())
        )
        while gone := await self._database.run(work):
            for file_id in gone:
                await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)
        for path in await asyncio.to_thread(self._old):
            if await self._database.run(lambda t, name=path.name: self._is_unknown(t, name)):  # type: ignore[misc]
                await asyncio.to_thread(path.unlink, missing_ok=True)

    def _old(self) -> list[Path]:
        """Return the files that are too old to be still written."""
        found = []
        for path in self._folder.iterdir():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > LEFT_OVER_SECONDS:
                    found.append(path)
        return found

    def _is_unknown(self, t: Transaction, name: str) -> bool:
        return t.one("SELECT 1 FROM gateway_files WHERE id = ?", name) is None

    def _forget(self, t: Transaction, found: File) -> None:
        if t.execute("DELETE FROM gateway_files WHERE id = ?", found.id):
            kept.add(t, found.tenant, KIND, -found.bytes)

    def refuse_full(self, t: Transaction, tenant: str) -> None:
        """Raise GatewayError if nothing more may be kept."""
        if (room := self.room(t, tenant)) <= 0:
            raise self._full(room)

    def _full(self, room: int) -> GatewayError:
        if room < self._file_bytes:
            message = f"only {max(room, 0)} bytes of the tenant's {self._tenant_bytes} are free; delete files"
            return GatewayError(413, message, code="storage_full", parameter="file")
        return GatewayError(
            413, f"a file has at most {self._file_bytes} bytes", code="file_too_large", parameter="file"
        )


def _file(row: Row) -> File:
    file_id, tenant, purpose, name, size, created, expires = row
    return File(file_id, tenant, purpose, name, int(size), created, expires)


def _declared_bytes(request: Request) -> int | None:
    """Return the length of a body, which a client need not say."""
    length = request.headers.get("content-length")
    return int(length) if length is not None and length.isascii() and length.isdigit() else None


def _count(t: Transaction, table: str, tenant: str) -> int:
    row = t.one(f"SELECT COUNT(*) FROM {table} WHERE tenant = ?", tenant)
    return 0 if row is None else int(row[0])


def _unreserve(t: Transaction, file_id: str) -> bool:
    return bool(t.execute("DELETE FROM gateway_uploads WHERE file = ?", file_id))


def _flush(target: Any) -> None:
    target.flush()
    os.fsync(target.fileno())
