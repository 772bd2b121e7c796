"""Skips tests where vLLM-Omni is not installed, or fails them where it should be.

`make test-versions` says that it should be: otherwise nobody would notice tests that are skipped everywhere.
"""

from __future__ import annotations

import os
from importlib import metadata

import pytest

EXPECTED = "DYNAMO_VLLM_TEST_OMNI"


def lacks(*packages: str) -> bool:
    """Whether one of them is not installed; never True where all are expected."""
    for package in packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            if os.environ.get(EXPECTED):
                pytest.fail(f"{EXPECTED} is set, but {package} is not installed", pytrace=False)
            return True
    return False


def skip() -> None:
    """For a whole module or one test."""
    pytest.skip(
        "vLLM-Omni is not installed, which needs vLLM 0.30: make test-versions ARGS='--suite omni'",
        allow_module_level=True,
    )
