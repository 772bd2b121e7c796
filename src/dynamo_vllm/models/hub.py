"""Downloads a model from the Hugging Face hub into the hub's own cache: the files that vLLM reads.

The library handles endpoint, token and offline mode. If the hub fails, the cache is used.
"""

from __future__ import annotations

import glob
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Collection

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 10
INDEX = "model.safetensors.index.json"
_OTHER_FRAMEWORKS = {".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite", ".mlmodel", ".gguf"}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", *_OTHER_FRAMEWORKS}
_FOR_READERS = {".md", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".gitattributes"}
_FORMATS = {
    "dummy": (),
    "safetensors": (".safetensors",),
    "fastsafetensors": (".safetensors",),
    "instanttensor": (".safetensors",),
    "runai_streamer": (".safetensors",),
    "mistral": (".safetensors",),
    "npcache": (".bin", ".pt"),
    "pt": (".pt",),
}
"""By vLLM's --load-format: the first kind that a repository has at its top level is read."""
_ANY_FORMAT = (".safetensors", ".bin", ".pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model by its hub id, and vLLM's flags about its source."""

    model: str
    revision: str | None = None
    download_dir: str | None = None
    token: str | None = field(default=None, repr=False)
    """Replaces HF_TOKEN."""
    load_format: str = "auto"
    whole: bool = False
    """Pipelines read weights of several kinds from several folders."""


def fetch(wanted: Wanted) -> str:
    """Return the folder with the model. Blocks."""
    try:
        import httpx
        from huggingface_hub import HfApi, errors
    except ImportError:
        raise StartError(
            f"--model {wanted.model}: not a folder, and huggingface_hub is needed to download it; "
            "run: pip install huggingface_hub"
        ) from None
    model, revision = wanted.model, wanted.revision
    try:
        info = HfApi(token=wanted.token).model_info(model, revision=revision, timeout=ANSWER_SECONDS)
        return _download(wanted, [item.rfilename for item in info.siblings or ()])
    except errors.HFValidationError:
        raise StartError(f"--model {model} is neither a folder nor a hub id") from None
    except errors.RevisionNotFoundError:
        raise StartError(f"--model {model} has no --revision {revision}") from None
    except (httpx.HTTPError, OSError, RuntimeError, errors.XetDownloadError) as exc:
        reason, fix = _reason_and_fix(exc)
        folder = _from_cache(wanted)
        if folder is None:
            raise StartError(
                f"--model {model}: not a folder, the hub does not provide it ({reason}), "
                f"and the cache does not have all of it; {fix}"
            ) from exc
    logger.warning("%s is used as it is in the cache: the hub does not provide it (%s)", model, reason)
    return folder


def _reason_and_fix(exc: Exception) -> tuple[str, str]:
    """Describe why the hub failed, and what to do."""
    from huggingface_hub import errors

    if isinstance(exc, errors.GatedRepoError):
        return "it is gated", "ask its owner, then set HF_TOKEN"
    if isinstance(exc, errors.RepositoryNotFoundError):
        return "it has none of this name, or HF_TOKEN may not read it", "check both"
    # Unreachable, offline, answers of 5xx, a full disk.
    said = getattr(exc, "strerror", None) or type(exc).__name__
    return said, "check the network and the disk, or give a local folder"


def _download(wanted: Wanted, names: Collection[str]) -> str:
    """Download the weights last: if they are there, the rest is complete."""
    from huggingface_hub import snapshot_download

    def bring(some: Collection[str], revision: str | None) -> str:
        patterns = [glob.escape(name) for name in some]
        found: str = snapshot_download(
            wanted.model,
            revision=revision,
            cache_dir=wanted.download_dir,
            token=wanted.token,
            allow_patterns=patterns,
        )
        return found

    folder = bring([name for name in names if _is_read(name) and not _is_weights(name)], wanted.revision)
    if weights := needed_weights(wanted, names, _indexed(folder)):
        bring(weights, Path(folder).name)  # the same commit, even if the branch has moved on
    return folder


def _from_cache(wanted: Wanted) -> str | None:
    from huggingface_hub import errors, snapshot_download

    try:
        folder: str = snapshot_download(
            wanted.model,
            revision=wanted.revision,
            cache_dir=wanted.download_dir,
            local_files_only=True,
            allow_patterns=["config.json", "model_index.json"],
        )
    except errors.LocalEntryNotFoundError:
        return None
    there = {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
    indexed = _indexed(folder)
    weights = needed_weights(wanted, there, indexed)
    is_whole = indexed <= there if any(name in indexed for name in weights) else bool(weights)
    return folder if is_whole or wanted.load_format == "dummy" else None


def needed_weights(wanted: Wanted, names: Collection[str], indexed: Collection[str] = ()) -> list[str]:
    """Choose files of a repository as vLLM 0.30 does; `indexed` are those that its index names."""
    weights = [name for name in names if _is_weights(name) and _is_read(name)]
    if wanted.whole:
        return weights
    top = [name for name in weights if "/" not in name]
    consolidated = [name for name in top if PurePosixPath(name).match("consolidated*.safetensors")]
    if wanted.load_format == "mistral" or (wanted.load_format == "auto" and consolidated):
        return consolidated
    for suffix in _FORMATS.get(wanted.load_format, _ANY_FORMAT):
        if found := [name for name in top if name.endswith(suffix)]:
            if suffix == ".safetensors" and set(found) & set(indexed):
                found = [name for name in found if name in indexed]
            return found + [name for name in weights if "/" in name and name.endswith(suffix)]
    return []


def _indexed(folder: str) -> set[str]:
    try:
        index: Any = json.loads(Path(folder, INDEX).read_text())
        return set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()  # most small models have none


def _is_weights(name: str) -> bool:
    return PurePosixPath(name).suffix in _WEIGHTS


def _is_read(name: str) -> bool:
    """Return whether vLLM reads a file; `original/` is the same model in a format that it skips."""
    path = PurePosixPath(name)
    unread = _FOR_READERS | _OTHER_FRAMEWORKS
    return path.parts[0] != "original" and path.suffix not in unread and path.name not in unread
