"""Downloads an adapter from the Hugging Face hub, with the hub's own library and cache.

The library handles endpoint, token and offline mode. If the hub is unreachable, the cache is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import BadCommand, SourceFailed
from dynamo_vllm.lora.base import NEEDED
from dynamo_vllm.lora.sources import base

if TYPE_CHECKING:
    from dynamo_vllm.lora.base import Fetched, OnProgress

ANSWER_SECONDS = 10


def fetch(uri: str, _cache: Path, limits: base.SourceLimits, report: OnProgress) -> Fetched:
    repository, revision = _address(uri)
    folder = _bring(uri, repository, revision, limits, report).resolve()
    return base.take(folder, folder.parent.parent, limits, uri, report)


def _address(uri: str) -> tuple[str, str | None]:
    repository, at, revision = uri.removeprefix("hf://").partition("@")
    owner, _, name = repository.strip("/").partition("/")
    if not owner or not name or "/" in name or (at and not revision):
        raise BadCommand(
            f"{uri!r} is not the address of a repository; write hf://owner/name or hf://owner/name@revision"
        )
    return f"{owner}/{name}", revision or None


def _bring(
    uri: str, repository: str, revision: str | None, limits: base.SourceLimits, report: OnProgress
) -> Path:
    import httpx

    try:
        from huggingface_hub import HfApi, errors
    except ImportError:
        raise SourceFailed(f"{uri} needs huggingface_hub; run: pip install huggingface_hub") from None
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=ANSWER_SECONDS)
    except errors.HFValidationError:
        raise BadCommand(f"{uri!r} is not the address of a repository; write hf://owner/name") from None
    except errors.RevisionNotFoundError:
        raise SourceFailed(f"{uri}: the repository has no revision {revision}") from None
    except errors.GatedRepoError:
        raise SourceFailed(f"{uri}: the repository is gated; ask its owner, then set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise SourceFailed(f"{uri}: there is no such repository, or HF_TOKEN may not read it") from None
    except (httpx.HTTPError, OSError) as exc:  # unreachable, offline, answers of 5xx
        return _from_cache(uri, repository, revision, exc)
    sizes = {item.rfilename: item.size for item in info.siblings or ()}
    base.check_names(sizes, limits, uri)
    try:
        return _download(repository, revision, str(info.sha), sizes, report)
    except (httpx.HTTPError, OSError, ValueError, RuntimeError, errors.XetDownloadError) as exc:
        raise SourceFailed(f"{uri}: the download broke off ({type(exc).__name__}); load it again") from exc


def _from_cache(uri: str, repository: str, revision: str | None, reason: Exception) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(repository, name, revision=revision) for name in NEEDED]
    paths = [Path(path) for path in found if isinstance(path, str)]
    if len(paths) < len(NEEDED):
        raise SourceFailed(
            f"{uri}: the hub does not answer ({type(reason).__name__}), and the cache does not have it"
        ) from reason
    return paths[0].parent


def _download(
    repository: str, revision: str | None, commit: str, sizes: dict[str, int | None], report: OnProgress
) -> Path:
    from huggingface_hub import hf_hub_download
    from tqdm import tqdm

    total = sum(sizes[name] or 0 for name in NEEDED)
    done = 0

    class Meter(tqdm):  # type: ignore[misc]
        """Counts the bytes and draws nothing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(disable=True)

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            done += int(n or 0)
            report(min(done, total), total)

        # Without these the hub's faster transport reports bytes twice: as they arrive packed, too.
        def update_transfer(self, n: float | None = 1) -> None: ...
        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None: ...

    for name in NEEDED:
        path = hf_hub_download(repository, name, revision=commit, tqdm_class=Meter)
    # With all files here, the cache records which commit the branch or tag means.
    hf_hub_download(repository, NEEDED[0], revision=revision, tqdm_class=Meter)
    return Path(path).parent
