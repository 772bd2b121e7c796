"""Manages the folder of downloaded adapters: an adapter under its final name is complete.

Several workers may share it. A download goes to a folder `.part-…`, whose lock file is held during the
download, so that leftovers of an interrupted one are recognised.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PART, _LOCK, _OLD = ".part-", ".lock", ".old"


def cache_folder(lora_path: str | None, env: Mapping[str, str]) -> Path:
    if lora_path:
        return Path(lora_path).expanduser().absolute()
    return folders.cache(env) / "dynamo-vllm" / "adapters"


class Store:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: str, sizes: Mapping[str, int]) -> Path | None:
        """Return the adapter of that name, unless somebody has changed its files."""
        folder = self._folder / name
        for file, size in sizes.items():
            path = folder / file
            if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
                return None
        return folder

    @contextlib.contextmanager
    def part(self) -> Iterator[Path]:
        """Create a folder to download into; removed afterwards, unless it was kept."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked_name() as path:
            path.mkdir()
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _locked_name(self) -> Iterator[Path]:
        while True:
            path = self._folder / f"{_PART}{uuid.uuid4().hex}"
            lock = Path(f"{path}{_LOCK}")
            with lock.open("x") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                if not lock.exists():  # removed by another worker before it was locked
                    continue
                try:
                    yield path
                    return
                finally:
                    lock.unlink(missing_ok=True)

    def keep(self, part: Path, name: str, sizes: Mapping[str, int]) -> Path:
        """Give a complete download its name, atomically; another worker may have been faster."""
        for path in (*part.iterdir(), part):
            _sync(path)
        found = self.find(name, sizes)
        if found is not None:
            return found
        target = self._folder / name
        with contextlib.suppress(FileNotFoundError):  # somebody has changed it
            os.rename(target, part / _OLD)
        try:
            os.rename(part, target)
        except OSError:
            found = self.find(name, sizes)
            if found is None:
                raise
            return found
        shutil.rmtree(target / _OLD, ignore_errors=True)
        _sync(self._folder)
        return target

    def clean(self) -> int:
        """Remove leftovers of interrupted downloads; return how many."""
        count = 0
        for lock in self._folder.glob(f"{_PART}*{_LOCK}"):
            with contextlib.suppress(FileNotFoundError), lock.open("r") as held:
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # alive
                shutil.rmtree(str(lock).removesuffix(_LOCK), ignore_errors=True)
                lock.unlink()
                count += 1
        return count


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
