"""Chooses where files of the user go when the home folder is missing or not writable.

vLLM, Hugging Face's libraries and the runtime keep files below the home folder. Without one some of them
create a folder `~` in the current one, and frontend 1.6.1 does not find the model it has just put there.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import private
from dynamo_vllm.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ROOM_BYTES = 256 * 1024
"""What a start writes into a run folder, four times."""
_HUB = Path(".cache", "huggingface")


def cache(environment: Mapping[str, str]) -> Path:
    """Return the folder for caches of this user; the writer creates it."""
    if named := environment.get("XDG_CACHE_HOME"):
        return Path(named)
    mine = home(environment)
    return (mine if mine is not None and is_usable(mine) else spare_home(environment)) / ".cache"


def data(environment: Mapping[str, str]) -> Path:
    """Return the folder for our data of this user; the writer creates it."""
    if named := environment.get("XDG_DATA_HOME"):
        return Path(named, "dynamo-vllm")
    mine = home(environment)
    usable = (
        mine if mine is not None and can_be_written(mine / ".local" / "share") else spare_home(environment)
    )
    return usable / ".local" / "share" / "dynamo-vllm"


def home(environment: Mapping[str, str]) -> Path | None:
    """Return the user's home folder; None for a user without a name and without HOME."""
    if named := environment.get("HOME"):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def is_usable(home: Path) -> bool:
    """Return whether caches can be kept there; a `.cache` that only root may write to is not rare."""
    return can_be_written(home) and can_be_written(home / ".cache")


def can_be_written(folder: Path) -> bool:
    """Also if it can be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def spare_home(environment: Mapping[str, str]) -> Path:
    """Return the substitute for the home folder; refuse one that others can write to."""
    if named := environment.get("XDG_CACHE_HOME"):
        folder = Path(named, "dynamo-vllm", "home")
    else:
        folder = Path(environment.get("TMPDIR") or "/tmp", f"dynamo-vllm-home-{os.getuid()}")
    try:
        found = folder.lstat()
    except OSError:
        return folder
    if not private.is_own_folder(found):
        raise ConfigError(f"{folder} may belong to another user; set HOME to a folder that you can write to")
    return folder


def for_worker(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give vLLM and its libraries writable folders; none if the home folder works.

    A read-only home folder is kept: keys and models may be there.
    """
    mine = home(environment)
    if mine is not None and is_usable(mine):
        return _missing(environment, {"HOME": mine})
    folder = make_spare_home(environment)
    if mine is None or not mine.is_dir():
        return {"HOME": str(folder)}
    wanted = {
        "XDG_CACHE_HOME": folder / ".cache",
        "XDG_CONFIG_HOME": folder / ".config",
        "TRITON_HOME": folder,
        "FLASHINFER_WORKSPACE_BASE": folder,
        "CUDA_CACHE_PATH": folder / ".nv" / "ComputeCache",
        **_hub_home(mine),
    }
    return _missing(environment, wanted)


def for_frontend(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the same for the runtime's server, which keeps tokenizers only in HOME/.cache/dynamo."""
    mine = home(environment)
    if mine is not None and is_usable(mine):
        return _missing(environment, {"HOME": mine})
    hub = _missing(environment, _hub_home(mine)) if mine is not None else {}
    return {"HOME": str(make_spare_home(environment)), **hub}


def frontend_cache(environment: Mapping[str, str]) -> Path:
    """Return where it keeps tokenizers; it would retry forever if it cannot."""
    folder = Path(environment["HOME"], ".cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StartError(f"{folder} cannot be created: {exc.strerror}; set HOME to another folder") from None
    return folder


def make_spare_home(environment: Mapping[str, str]) -> Path:
    folder = spare_home(environment)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"the home folder is not writable, and {folder} cannot be created ({exc.strerror}); "
            "set HOME to a folder that you can write to"
        ) from None
    return spare_home(environment)  # another process may have created it first


def _missing(environment: Mapping[str, str], wanted: Mapping[str, Path]) -> dict[str, str]:
    """The user's settings win."""
    return {name: str(path) for name, path in wanted.items() if not environment.get(name)}


def _hub_home(home: Path) -> dict[str, Path]:
    """Existing models are worth more than a place to download others to."""
    return {"HF_HOME": home / _HUB} if (home / _HUB).is_dir() else {}


def refuse_full_disk(folder: Path, remedy: str) -> None:
    """Reject a full disk in one line: otherwise processes wait for files that never come."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
            file.flush()
    except OSError as exc:
        raise StartError(f"{folder}: {exc.strerror}; free disk space there, or {remedy}") from None


def complete_environment(
    environment: Mapping[str, str], missing: Callable[[Mapping[str, str]], dict[str, str]]
) -> dict[str, str]:
    """Return the environment with what is missing in it, for this process and its children."""
    found = missing(environment)
    os.environ.update(found)
    return {**environment, **found}
