"""Runs a command on a machine with less: as an ordinary user, on one core, with small disks, under a quota.

Run as `python -m harness.bare SPEC COMMAND…` with SPEC the JSON of a `Machine`. Everything is undone by the
end of the command: disks are mounted in a mount namespace of its own, limits are those of the process.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_NEW_MOUNTS = 0x00020000
_READ_ONLY, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x1000, 0x4000, 0x40000
_CHUNK = bytes(4096)


@dataclass(frozen=True)
class Machine:
    """All but `env` and `folder` need root, or rights that root gave."""

    env: dict[str, str]
    """The whole environment."""
    folder: str = "/"
    """The current one."""
    uid: int | None = None
    """User and group, without any other group."""
    core: int | None = None
    """The only one to run on."""
    cgroup: str | None = None
    """Folder of the group to run in."""
    disks: dict[str, str] = field(default_factory=dict)
    """The size of a new file system by the folder it stands in for."""
    full: tuple[str, ...] = ()
    """Those of them that have no byte left."""
    read_only: tuple[str, ...] = ()
    """Folders that nobody can write to."""
    readable: tuple[str, ...] = ()
    """Folders that `uid` must reach, also in a home that is closed to others."""
    beside: int | None = None
    """A process with whose disks to run."""

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "harness.bare", json.dumps(asdict(self)), *words]


def main(spec: str, command: Sequence[str]) -> None:
    machine = Machine(**json.loads(spec))
    if machine.cgroup is not None:
        Path(machine.cgroup, "cgroup.procs").write_text(str(os.getpid()))
    if machine.core is not None:
        os.sched_setaffinity(0, {machine.core})
    if machine.beside is not None:
        with open(f"/proc/{machine.beside}/ns/mnt", "rb") as namespace:
            _call("setns", namespace.fileno(), _NEW_MOUNTS)
    elif machine.disks or machine.read_only or machine.readable:
        mount_all(machine)
    os.chdir(machine.folder)
    if machine.uid is not None:
        os.setgroups([])
        os.setresgid(machine.uid, machine.uid, machine.uid)
        os.setresuid(machine.uid, machine.uid, machine.uid)
    os.execve(command[0], [*command], machine.env)


def mount_all(machine: Machine) -> None:
    _call("unshare", _NEW_MOUNTS)
    _mount("none", "/", flags=_PRIVATE | _RECURSIVE)
    open_up(machine.readable)
    for folder, size in machine.disks.items():
        _mount("tmpfs", folder, "tmpfs", options=f"size={size},mode=777")
    for folder in machine.read_only:
        _mount("tmpfs", folder, "tmpfs", _READ_ONLY, "size=4k,mode=755")
    for folder in machine.full:
        fill(Path(folder))


def fill(folder: Path) -> Path:
    """A file that leaves no room beside it."""
    path = folder / "filled"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(_CHUNK)
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise
    return path


def open_up(folders: Sequence[str]) -> None:
    """Let everybody reach these folders; others that lie beside them in a closed one are out of sight."""
    closed: dict[str, dict[str, int]] = {}
    for folder in folders:
        if (above := closed_above(Path(folder))) is not None:
            closed.setdefault(above, {})[folder] = os.open(folder, os.O_PATH)
    for above, below in closed.items():
        _mount("tmpfs", above, "tmpfs", options="size=1m,mode=755")
        for folder, handle in below.items():
            os.makedirs(folder, exist_ok=True)
            _mount(f"/proc/self/fd/{handle}", folder, flags=_BIND | _RECURSIVE)


def closed_above(folder: Path) -> str | None:
    """The uppermost folder on the way there that others may not enter."""
    for path in [*reversed(folder.parents), folder]:
        if not path.stat().st_mode & stat.S_IXOTH:
            return str(path)
    return None


def _mount(source: str, folder: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    kind_bytes = kind.encode() if kind is not None else None
    options_bytes = options.encode() or None
    _call("mount", source.encode(), folder.encode(), kind_bytes, ctypes.c_ulong(flags), options_bytes)


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
