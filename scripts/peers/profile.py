"""Profiles a process with py-spy during a stage of load."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

from peers.contestants import Contestant
from peers.load import LoadFailed
from peers.match import say
from peers.settings import Stage

FORMATS = {"raw": "txt", "flamegraph": "svg"}
RATE = 200
LEAD_SECONDS = 5.0
"""The load runs this much longer: its client takes a moment to start, and the batch to fill."""


def find_py_spy() -> str | None:
    """On the path, or where its wheel was unpacked: with pip or without."""
    if found := shutil.which("py-spy"):
        return found
    for folder in [Path(sys.prefix), *map(Path, filter(None, sys.path))]:
        for binary in [folder / "bin" / "py-spy", *folder.glob("py_spy-*.data/scripts/py-spy")]:
            if binary.is_file():
                if not os.access(binary, os.X_OK):
                    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
                return str(binary)
    return None


def profile(up: Contestant, stage: Stage, seconds: int, folder: Path) -> None:
    """Write the stacks of the peer's Python processes under load, as lines and as flame graphs."""
    py_spy = find_py_spy()
    if py_spy is None:
        say("no profile: py-spy is neither on the path nor in a site folder")
        return
    labels = [label for label in dict.fromkeys((up.main, "engine")) if label in up.watched]
    long = replace(stage, seconds=len(labels) * len(FORMATS) * seconds + 2 * LEAD_SECONDS)
    failed: list[str] = []

    def put_load() -> None:
        try:
            up.measure(long, seed=77)
        except LoadFailed as exc:
            failed.append(str(exc))

    client = threading.Thread(target=put_load)
    client.start()
    client.join(LEAD_SECONDS)
    for label, (kind, ending) in itertools.product(labels, FORMATS.items()):
        path = folder / f"profile-{up.name}-{label}-{kind}.{ending}"
        command = [py_spy, "record", "--pid", str(up.watched[label]), "--duration", str(seconds)]
        command += ["--rate", str(RATE), "--format", kind, "--output", str(path), "--nonblocking"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        ok = done.returncode == 0 and path.exists()
        said = (done.stderr or done.stdout).strip().splitlines()
        say(f"profile of {up.name}'s {label}: {path.name if ok else ' '.join(said[-2:])}")
    client.join()
    for line in failed:
        say(f"the load of the profile failed: {line}")
