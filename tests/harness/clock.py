"""Sets the wall clock of processes, with libfaketime; their monotonic clock goes on as it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NEEDS = "needs libfaketime (the Debian package of that name has it)"


def faketime() -> Path | None:
    """The library, of the system or as CI unpacks it."""
    roots = (Path("/usr"), Path(sys.prefix, "libfaketime", "usr"))
    folders = [folder for root in roots for above in ("lib*", "lib*/*") for folder in root.glob(above)]
    found = [path for folder in folders if (path := folder / "faketime" / "libfaketimeMT.so.1").exists()]
    return found[0] if found else None


def environment(library: Path, clock: Path, *modules: str) -> dict[str, str]:
    """For processes whose clock is set by what is written into `clock`, such as +1h; they look each second.

    `modules` are folders for PYTHONPATH.
    """
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "faked_clock"), *modules]),
    }
