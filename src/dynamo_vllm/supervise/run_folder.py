"""The folder of one `serve`: its logs, and the discovery files of its processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def discovery(self) -> Path:
        return self.path / "discovery"

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, with nothing in discovery, and hold it against another `serve`."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a+")
        except OSError as exc:
            raise StartError(
                f"--run-dir {self.path} cannot be used: {exc.strerror}; choose another"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StartError(
                    f"--run-dir {self.path} is in use by another serve; choose another"
                ) from None
            self.forget()
            self.discovery.mkdir()
            yield

    def forget(self) -> None:
        """Remove the discovery files."""
        shutil.rmtree(self.discovery, ignore_errors=True)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where this package may keep files of the user."""
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/tmp"), ".cache")
    return Path(cache, "dynamo-vllm")


def choose(run_dir: str | None, environment: Mapping[str, str]) -> RunFolder:
    """The folder that was asked for, or a new one in the cache."""
    if run_dir is not None:
        return RunFolder(Path(run_dir).absolute())
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return RunFolder(cache_folder(environment) / "run" / name)
