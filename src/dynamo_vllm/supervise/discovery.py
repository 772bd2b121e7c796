"""Takes a killed worker out of file discovery at once, instead of after its lease.

Until then the frontend goes on sending to it: for ten seconds every request fails when it was the only one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Mapping


def forget(instance: int, environment: Mapping[str, str]) -> None:
    """Remove what an ended process left behind; other kinds of discovery have only their leases."""
    folder = environment.get("DYN_FILE_KV")
    if environment.get("DYN_DISCOVERY_BACKEND", "file") != "file" or not folder:
        return
    for entry in Path(folder).rglob("*"):
        if unquote(entry.name).rpartition("/")[2] == f"{instance:x}":
            with contextlib.suppress(OSError):  # a lease ran out in the same moment
                entry.unlink()
