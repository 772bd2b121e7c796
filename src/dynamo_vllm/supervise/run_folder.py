"""The run folder of one `serve`: its logs, and the discovery files of its processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import folders, private
from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import TextIOWrapper

EMBEDDINGS = "embeddings"
"""Next to the discovery files: the output of encode workers."""
_LOCK, _NOTE, _TARGETS = "lock", "serve.json", "prometheus.json"
_NAME = re.compile(r"\d{8}-\d{6}-\d+")
NEW_SECONDS = 60.0
LOOK_SECONDS = 0.5
"""A command that checks whether a serve runs holds the lock for a moment."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path
    link: Path | None = None
    """Where `running` finds a folder that the user chose; a link to `path`."""

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def discovery(self) -> Path:
        return self.path / "discovery"

    @property
    def targets(self) -> Path:
        """For Prometheus."""
        return self.path / _TARGETS

    @property
    def _note(self) -> Path:
        """Also marks the folder as ours."""
        return self.path / _NOTE

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder with empty discovery, and lock it against another `serve`."""
        self._refuse_what_is_not_ours()
        try:
            private.make(self.logs)
            lock = os.fdopen(private.open_file(self.path / _LOCK, os.O_RDWR | os.O_CREAT), "r+")
        except OSError as exc:
            raise StartError(
                f"--run-dir {self.path} cannot be used: {exc.strerror}; choose another"
            ) from None
        folders.refuse_full_disk(self.path, "choose another folder with --run-dir")
        with lock:
            self._hold(lock)
            self.forget()
            self._write_note({})
            self.discovery.mkdir(mode=0o700)
            with self._linked():
                yield

    def _refuse_what_is_not_ours(self) -> None:
        """A project may have its own embeddings folder, which `forget` would remove.

        Files next to the note of a failed or killed serve belong to that serve.
        """
        if self.is_held or "pid" in self._noted():
            return
        ours = (self.discovery, self.path / EMBEDDINGS, self.targets, self._note)
        if found := [path.name for path in ours if os.path.lexists(path)]:
            raise StartError(
                f"--run-dir {self.path} has {' and '.join(found)}, which serve did not create and would "
                "remove; choose a new or empty folder"
            )

    def _hold(self, lock: TextIOWrapper) -> None:
        deadline = time.monotonic() + LOOK_SECONDS
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StartError(
                        f"--run-dir {self.path} is in use by another serve; choose another"
                    ) from None
                time.sleep(0.01)

    @contextlib.contextmanager
    def _linked(self) -> Iterator[None]:
        """Other commands look in the user's cache; if it is not writable, they only cannot find
        this serve.
        """
        with contextlib.suppress(OSError):
            if self.link is not None:
                private.make(self.link.parent)
                self.link.symlink_to(self.path)
        try:
            yield
        finally:
            if self.link is not None:
                with contextlib.suppress(OSError):
                    self.link.unlink()

    @property
    def is_held(self) -> bool:
        """Return whether a `serve` runs in it."""
        try:
            with open(private.open_file(self.path / _LOCK, os.O_RDONLY, of_anyone=True)) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def note(
        self,
        url: str,
        reach: Mapping[str, str | None] | None = None,
        control: Path | None = None,
        console: str | None = None,
    ) -> None:
        """Tell the other commands of this machine where the frontend will be, and how to find the workers.

        `control` is the socket on which serve takes orders, `console` the URL of the web console.
        """
        told = {} if control is None else {"control": str(control)}
        if console is not None:
            told["console"] = console
        self._write_note({"url": url, "reach": dict(reach or {}), **told})

    def _write_note(self, content: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):
            private.write(self._note, json.dumps({**content, "pid": os.getpid()}))

    @property
    def url(self) -> str | None:
        """Return what `note` wrote."""
        url = self._noted().get("url")
        return None if url is None else str(url)

    @property
    def reach(self) -> dict[str, object]:
        """Return what `note` wrote; empty for a serve that has not come so far."""
        found = self._noted().get("reach")
        return found if isinstance(found, dict) else {}

    @property
    def control(self) -> Path | None:
        """Return what `note` wrote; the socket may not be there yet."""
        found = self._noted().get("control")
        return Path(found) if isinstance(found, str) else None

    @property
    def console(self) -> str | None:
        """Return what `note` wrote: the URL of the web console."""
        found = self._noted().get("console")
        return found if isinstance(found, str) else None

    def _noted(self) -> dict[str, object]:
        try:
            with open(private.open_file(self._note, os.O_RDONLY, of_anyone=True)) as note:
                found = json.load(note)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def forget(self) -> None:
        """Remove the discovery files, and the output of encode workers; nothing else here is ours.

        A failed serve leaves them, so that Prometheus reports its processes as down.
        """
        self.targets.unlink(missing_ok=True)
        shutil.rmtree(self.discovery, ignore_errors=True)
        shutil.rmtree(self.path / EMBEDDINGS, ignore_errors=True)
        self._note.unlink(missing_ok=True)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return where this package may keep files of the user."""
    return folders.cache(environment) / "dynamo-vllm"


def choose(run_dir: str | None, environment: Mapping[str, str]) -> RunFolder:
    """Return the requested folder, or a new one in the cache."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    mine = _all(environment) / name
    return RunFolder(mine) if run_dir is None else RunFolder(Path(run_dir).absolute(), mine)


def running(environment: Mapping[str, str]) -> list[RunFolder]:
    """Return the folders of every running `serve` of this user on this machine, oldest first."""
    try:
        names = sorted(_all(environment).iterdir())
    except OSError:
        return []
    found: dict[Path, RunFolder] = {}
    for name in names:
        folder = RunFolder(name.resolve())
        if folder.is_held:
            found[folder.path] = folder
        elif name.is_symlink():  # of a killed serve
            with contextlib.suppress(OSError):
                name.unlink()
    return list(found.values())


def prune(environment: Mapping[str, str], keep: int) -> None:
    """Remove the oldest folders of ended or killed runs of this user; the last `keep` stay."""
    try:
        names = sorted(name for name in _all(environment).iterdir() if _is_of_a_run(name))
    except OSError:
        return
    over = [name for name in names if not RunFolder(name).is_held]
    for name in over[: max(0, len(over) - keep)]:
        shutil.rmtree(name, ignore_errors=True)


def _is_of_a_run(path: Path) -> bool:
    """Return whether `choose` named it and this user created it; not one that is being created,
    before its lock.
    """
    try:
        found = path.lstat()
        is_old = time.time() - (path / _LOCK).lstat().st_mtime > NEW_SECONDS
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and is_old and _NAME.fullmatch(path.name) is not None


def _all(environment: Mapping[str, str]) -> Path:
    return cache_folder(environment) / "run"
