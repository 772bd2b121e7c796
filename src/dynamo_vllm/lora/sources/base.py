"""Checks the files of every source: their names, their size, and that no link leads out of the folder."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import AdapterRefused, SourceFailed
from dynamo_vllm.lora.base import CONFIG, NEEDED, WEIGHTS, Fetched
from dynamo_vllm.lora.inspect import MAX_CONFIG_BYTES, PICKLES, pickle_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from dynamo_vllm.lora.base import OnProgress

ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceLimits:
    max_bytes: int = 8 << 30
    max_objects: int = 1000
    """With more objects than this, the place is rejected as not that of one adapter."""


class Stopped(Exception):
    """The caller no longer waits for the files."""


def check_names(sizes: Mapping[str, int | None], limits: SourceLimits, where: str) -> None:
    """Raise if a needed file is missing or too large; `sizes` are those of the names found, if known."""
    if not sizes:
        raise SourceFailed(f"{where}: it is empty or does not exist")
    for name in NEEDED:
        if name not in sizes:
            raise AdapterRefused(f"{where}: {_without(name, sizes)}")
    total = sum(sizes[name] or 0 for name in NEEDED)
    if total > limits.max_bytes:
        raise AdapterRefused(
            f"{where}: the adapter has {total} bytes, the limit is {limits.max_bytes}; "
            "raise --lora-max-gb if this is intended"
        )
    if (sizes[CONFIG] or 0) > MAX_CONFIG_BYTES:
        raise AdapterRefused(f"{where}: {CONFIG} has more than {MAX_CONFIG_BYTES} bytes")


def _without(name: str, sizes: Mapping[str, int | None]) -> str:
    if name == WEIGHTS:
        for pickle in PICKLES:
            if pickle in sizes:
                return pickle_refusal(pickle)
    for other in sizes:
        if other.lower().endswith(ARCHIVES):
            return f"there is no {name} but the archive {other}; archives are not unpacked"
    return f"there is no {name}"


def refuse_archive(path: str, where: str) -> None:
    if path.lower().rstrip("/").endswith(ARCHIVES):
        raise AdapterRefused(f"{where} is an archive, which is not unpacked; give the folder")


def check_folder(folder: Path, root: Path, limits: SourceLimits, where: str) -> int:
    """Check that the needed files are regular and below `root`; return their bytes."""
    sizes: dict[str, int | None] = {}
    for name in (*NEEDED, *PICKLES):
        path = folder / name
        try:
            found = path.stat()
        except FileNotFoundError:
            if path.is_symlink():
                raise AdapterRefused(f"{where}: {name} is a link to nothing") from None
            continue
        except OSError as exc:  # a cycle of links, no permission
            raise SourceFailed(f"{where}: {name}: {exc.strerror}") from exc
        if not stat.S_ISREG(found.st_mode):
            raise AdapterRefused(f"{where}: {name} is not a regular file")
        if not path.resolve().is_relative_to(root):
            raise AdapterRefused(f"{where}: {name} is a link that leads out of the folder")
        sizes[name] = found.st_size
    if not sizes:
        raise AdapterRefused(f"{where}: there is no {CONFIG}")
    check_names(sizes, limits, where)
    return sum(sizes[name] or 0 for name in NEEDED)


def take(folder: Path, root: Path, limits: SourceLimits, where: str, report: OnProgress) -> Fetched:
    """Return the files of a folder in place, after all checks."""
    total = check_folder(folder, root, limits, where)
    try:
        # The bytes are local by now: reading them only checks whether somebody still waits.
        return Fetched(folder, digest(folder, lambda: report(total, total)), total)
    except OSError as exc:
        raise SourceFailed(f"{where}: {exc.strerror}") from exc


def digest(folder: Path, on_chunk: Callable[[], None] | None = None) -> str:
    """Hash the content of the needed files, each with its length before it."""
    hasher = hashlib.sha256()
    for name in NEEDED:
        with (folder / name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            hasher.update(f"{name}\0{size}\0".encode())
            while chunk := file.read(CHUNK_BYTES):
                hasher.update(chunk)
                if on_chunk is not None:
                    on_chunk()
    return hasher.hexdigest()
