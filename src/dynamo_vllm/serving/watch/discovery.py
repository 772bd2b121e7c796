"""Reads from discovery which workers and event channels a namespace has, without the runtime's watchers.

The runtime's own watchers would tell sooner, but each takes an inotify instance, of which a user has 128.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import msgspec

from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.serving.plane.etcd import Etcd, EtcdError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.options import ReachOptions
    from dynamo_vllm.config.planes import EtcdAccess

CHANNELS, SOURCES, INSTANCES, CARDS = "event_channels", "event_sources", "instances", "mdc"
TABLES = (CHANNELS, SOURCES, INSTANCES, CARDS)
GENERATE = "generate"
UNFINISHED = ".tmp_"
TICK_NS = 1_000_000_000
T = TypeVar("T")


class NotReadable(DynamoVllmError):
    """Discovery cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Channel:
    """Where a process publishes events."""

    topic: str
    publisher: int
    component: str
    address: str | None
    """The ZeroMQ endpoint; None if events go through NATS."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that requests can be routed to."""

    instance: int
    component: str
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What discovery has now."""

    channels: frozenset[Channel] = frozenset()
    sources: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The worker and rank of each publisher of KV events."""
    members: Mapping[int, Member] = field(default_factory=dict)


class _Name(msgspec.Struct, frozen=True):
    namespace: str = ""
    component: str = ""


class _Scope(msgspec.Struct, frozen=True):
    endpoint: _Name = _Name()


class _Transport(msgspec.Struct, frozen=True):
    kind: str = ""
    config: Any = None


class _Channel(msgspec.Struct):
    topic: str
    instance_id: int
    scope: _Scope
    transport: _Transport = _Transport()


class _Worker(msgspec.Struct):
    worker_id: int
    dp_rank: int = 0


class _Metadata(msgspec.Struct):
    worker: _Worker


class _Source(msgspec.Struct):
    publisher_id: int
    scope: _Scope
    metadata: _Metadata


class _Instance(msgspec.Struct):
    namespace: str
    component: str
    endpoint: str
    instance_id: int


class _CardBody(msgspec.Struct):
    display_name: str
    kv_cache_block_size: int = 0
    lora: Any = None


class _Card(msgspec.Struct):
    namespace: str
    instance_id: int
    card_json: _CardBody


_KINDS: dict[str, type[Any]] = {CHANNELS: _Channel, SOURCES: _Source, INSTANCES: _Instance, CARDS: _Card}


class Reader(Protocol):
    """Returns the entries of each table."""

    async def entries(self) -> Mapping[str, list[Any]]: ...

    async def close(self) -> None: ...


class FolderChanges:
    """Says whether files came to a folder or went; that workers touch theirs all the time does not count."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed: int | None = None

    def look(self) -> bool:
        """Return whether there may be something new since the last look."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError:
            changed = 0
        is_new = changed != self._changed
        # A file that comes within the same tick of the file system's clock leaves the same time.
        self._changed = changed if time.time_ns() - changed > TICK_NS else None
        return is_new


class FileReader:
    """Reads the folder of file discovery. A file that was read is read again only if it is another one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[int, Any]] = {}
        self._changes = [FolderChanges(folder / "v1" / table) for table in TABLES]
        self._tables: Mapping[str, list[Any]] = {}

    async def entries(self) -> Mapping[str, list[Any]]:
        """Return the same object while nothing has changed."""
        changed = [one.look() for one in self._changes]
        if not any(changed):
            return self._tables
        found: dict[str, tuple[int, Any]] = {}
        tables: dict[str, list[Any]] = {}
        for table in TABLES:
            rows = tables[table] = []
            for path, inode in self._files(table):
                known = self._read.get(path)
                if known is None or known[0] != inode:
                    known = (inode, _decoded(table, _content(path)))
                found[path] = known
                rows.append(known[1])
        self._read, self._tables = found, tables
        return tables

    def _files(self, table: str) -> list[tuple[str, int]]:
        try:
            with os.scandir(self._folder / "v1" / table) as files:
                return [(f.path, f.inode()) for f in files if not f.name.startswith(UNFINISHED)]
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise NotReadable(f"discovery at {self._folder} cannot be read: {exc}") from None

    async def close(self) -> None:
        """Nothing is open."""


class EtcdReader:
    def __init__(self, access: EtcdAccess, namespace: str) -> None:
        self._etcd = Etcd(access)
        self._namespace = namespace

    async def entries(self) -> Mapping[str, list[Any]]:
        tables = {}
        for table in TABLES:
            inside = "namespace/" if table in (CHANNELS, SOURCES) else ""
            prefix = f"v1/{table}/{inside}{self._namespace}/"
            try:
                rows = await self._etcd.below(prefix.encode())
            except EtcdError as exc:
                raise NotReadable(str(exc)) from None
            tables[table] = [_decoded(table, row) for row in rows.values()]
        return tables

    async def close(self) -> None:
        await self._etcd.__aexit__()


class Discovery:
    """What is in discovery for one namespace."""

    def __init__(self, reader: Reader, namespace: str) -> None:
        self._reader = reader
        self._namespace = namespace
        self._tables: Mapping[str, list[Any]] | None = None
        self._seen = Seen()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._reader.close()

    async def look(self) -> Seen:
        """Return the same object while nothing has changed; raise NotReadable if discovery is away."""
        tables = await self._reader.entries()
        if tables is self._tables:
            return self._seen
        channels = [row for row in _of(tables[CHANNELS], _Channel) if self._is_ours(row.scope)]
        sources = [row for row in _of(tables[SOURCES], _Source) if self._is_ours(row.scope)]
        self._tables = tables
        self._seen = Seen(
            frozenset(
                Channel(row.topic, row.instance_id, row.scope.endpoint.component, _address(row.transport))
                for row in channels
            ),
            {s.publisher_id: (s.metadata.worker.worker_id, s.metadata.worker.dp_rank) for s in sources},
            self._members(_of(tables[INSTANCES], _Instance), _of(tables[CARDS], _Card)),
        )
        return self._seen

    def _is_ours(self, scope: _Scope) -> bool:
        return scope.endpoint.namespace == self._namespace

    def _members(self, instances: list[_Instance], cards: list[_Card]) -> dict[int, Member]:
        by_worker: dict[int, list[_CardBody]] = {}
        for card in cards:
            if card.namespace == self._namespace:
                by_worker.setdefault(card.instance_id, []).append(card.card_json)
        found = {}
        for one in instances:
            if one.namespace == self._namespace and one.endpoint == GENERATE:
                own = by_worker.get(one.instance_id, [])
                found[one.instance_id] = Member(
                    one.instance_id,
                    one.component,
                    tuple(sorted(card.display_name for card in own if not card.lora)),
                    tuple(sorted(card.display_name for card in own if card.lora)),
                    max((card.kv_cache_block_size for card in own), default=0),
                )
        return found


def open_discovery(options: ReachOptions, access: EtcdAccess | None) -> Discovery:
    """Raise NotReadable for discovery through Kubernetes, which only the runtime reads."""
    if options.discovery_folder is not None:
        return Discovery(FileReader(options.discovery_folder), options.namespace)
    if access is not None:
        return Discovery(EtcdReader(access, options.namespace), options.namespace)
    raise NotReadable(
        f"discovery through {options.discovery_backend} cannot be read from outside the runtime"
    )


def _of(rows: list[Any], kind: type[T]) -> list[T]:
    return [row for row in rows if isinstance(row, kind)]


def _address(transport: _Transport) -> str | None:
    config = transport.config
    return str(config["endpoint"]) if transport.kind == "Zmq" and isinstance(config, dict) else None


def _content(path: str) -> bytes:
    with contextlib.suppress(OSError):  # removed meanwhile
        return Path(path).read_bytes()
    return b""


def _decoded(table: str, data: bytes) -> Any:
    """Return None for what another version of the runtime writes."""
    try:
        return msgspec.json.decode(data, type=_KINDS[table])
    except msgspec.DecodeError:
        return None
