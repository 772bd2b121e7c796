"""Uses a folder on this machine in place; the engine reads it only when the adapter is added."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from dynamo_vllm.errors import AdapterRefused, BadCommand, SourceFailed
from dynamo_vllm.lora.base import WEIGHTS
from dynamo_vllm.lora.sources import base

if TYPE_CHECKING:
    from dynamo_vllm.lora.base import Fetched, OnProgress


def fetch(uri: str, _cache: Path, limits: base.SourceLimits, report: OnProgress) -> Fetched:
    folder = _folder(uri)
    return base.take(folder, _root(folder), limits, str(folder), report)


def _folder(uri: str) -> Path:
    text = uri
    if uri.startswith("file://"):
        text = unquote(uri.removeprefix("file://").removeprefix("localhost"))
    if not text.startswith("/") or "\0" in text:
        raise BadCommand(f"{uri!r} is not an absolute path; write /folder or file:///folder")
    try:
        folder = Path(text).resolve(strict=True)
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as exc:  # RuntimeError: links in a cycle
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise SourceFailed(f"{text}: {reason}; the path must exist on the worker's machine") from exc
    if is_folder:
        return folder
    base.refuse_archive(text, text)
    raise AdapterRefused(f"{text} is a file; give the folder with {WEIGHTS}")


def _root(folder: Path) -> Path:
    """Return the folder that links may not leave; for a snapshot in the hub's cache it includes the blobs."""
    repository = folder.parent.parent
    if folder.parent.name == "snapshots" and (repository / "blobs").is_dir():
        return repository
    return folder
