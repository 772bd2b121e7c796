"""Makes a deployment look large: entries in discovery for workers that a few real ones answer for.

The entries are copies of the real workers' own, with other ids and names. They are touched as their
owners would do it; file discovery drops an entry that nobody has touched for ten seconds.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

TABLES = ("instances", "mdc")
EVENTS = "topic%2Fkv%2Devents"
WANTED = ("backend%2Fgenerate", "admin%2Fcontrol")
TOUCH_SECONDS = 2.0


class Copies:
    """The entries of `count` workers, and of their channels of KV events, until `close`.

    `channel` returns the address for a publisher.
    """

    def __init__(self, folder: Path, count: int, channel: Callable[[int], str], seed: int = 1) -> None:
        self._folder = folder / "v1"
        self._made = random.Random(seed)
        self._files: list[Path] = []
        self._is_over = threading.Event()
        originals = self._originals()
        copies = [self._made.randrange(1 << 52, 1 << 53) for _ in range(count)]
        for number, copied in enumerate(copies):
            self._copy(originals[sorted(originals)[number % len(originals)]], copied)
        self.workers = [*sorted(int(one, 16) for one in originals), *copies]
        self.publishers = {worker: self._publish(worker, channel) for worker in copies}
        self._touching = threading.Thread(target=self._touch, daemon=True)
        self._touching.start()

    def _originals(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for table in TABLES:
            for path in sorted((self._folder / table).iterdir()):
                if any(name in path.name for name in WANTED):
                    found.setdefault(path.name.rpartition("%2F")[2], []).append(path)
        return found

    def _copy(self, entries: Iterable[Path], instance: int) -> None:
        for path in entries:
            entry = json.loads(path.read_text()) | {"instance_id": instance}
            name = f"{path.name.rpartition('%2F')[0]}%2F{instance:x}"
            self._write(path.with_name(name), entry)

    def _publish(self, worker: int, channel: Callable[[int], str]) -> int:
        """Announce that somebody publishes the KV events of a worker; return the publisher's id."""
        publisher = self._made.randrange(1 << 51, 1 << 52)
        table = self._folder / "event_channels"
        original = next(path for path in sorted(table.iterdir()) if EVENTS in path.name)
        name = f"{original.name.rpartition('%2F')[0]}%2F{publisher:x}"
        entry = json.loads(original.read_text()) | {"instance_id": publisher}
        entry["transport"]["config"]["endpoint"] = channel(publisher)
        self._write(table / name, entry)
        source = json.loads((self._folder / "event_sources" / original.name).read_text())
        source |= {"publisher_id": publisher}
        source["metadata"] |= {"publisher_id": publisher, "worker": {"worker_id": worker, "dp_rank": 0}}
        self._write(self._folder / "event_sources" / name, source)
        return publisher

    def _write(self, path: Path, entry: Mapping[str, Any]) -> None:
        unfinished = path.with_name(f".tmp_{path.name}")
        unfinished.write_text(json.dumps(entry))
        unfinished.rename(path)
        self._files.append(path)

    def _touch(self) -> None:
        while not self._is_over.wait(TOUCH_SECONDS):
            for path in self._files:
                with suppress(FileNotFoundError):
                    os.utime(path)

    def close(self) -> None:
        self._is_over.set()
        self._touching.join()
        for path in self._files:
            path.unlink(missing_ok=True)
