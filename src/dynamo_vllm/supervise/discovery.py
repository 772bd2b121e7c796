"""Removes a killed worker from discovery at once, instead of after its lease.

Until then the frontend keeps sending to it: for ten seconds every request fails if it was the only one.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING
from urllib.parse import unquote

from dynamo_vllm.config import build, planes
from dynamo_vllm.config.options import ReachOptions
from dynamo_vllm.serving.plane.etcd import Etcd, EtcdError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


async def forget(instance: int, environment: Mapping[str, str]) -> None:
    """Remove the entries of an ended process, in files or in etcd; in Kubernetes the pod's end does it."""
    options = build.from_values(ReachOptions, {}, environment)
    access = planes.etcd_access(options, environment)
    if access is not None:
        with contextlib.suppress(EtcdError, OSError):  # it is down, or the lease has just expired
            async with Etcd(access) as etcd:
                await etcd.revoke(instance)
    elif options.discovery_folder is not None:
        _forget_files(instance, options.discovery_folder)


def _forget_files(instance: int, folder: Path) -> None:
    for parent, _, names in os.walk(folder):  # Python 3.11: rglob raises when a folder vanishes meanwhile
        for name in names:
            if unquote(name).rpartition("/")[2] == f"{instance:x}":
                with contextlib.suppress(OSError):  # a lease expired in the same moment
                    os.unlink(os.path.join(parent, name))
