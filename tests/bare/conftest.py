"""What tests on bare machines share: a folder that everybody can reach, and how commands start there."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_vllm.engine.machine import device
from harness.stack import TESTS

IS_ROOT = os.getuid() == 0


@pytest.fixture(scope="session", autouse=True)
def cpu() -> None:
    if device() != "cpu":
        pytest.skip("vLLM for GPUs needs more of a machine than this")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Unlike pytest's own folders one that other users may enter."""
    folder = Path(tempfile.mkdtemp(prefix="bare-machine-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def launcher() -> dict[str, str]:
    """The environment of `harness.bare` itself."""
    modules = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(modules)}


@pytest.fixture(scope="session")
def least() -> dict[str, str]:
    """The variables that any machine must have for these tests; no PATH, no HOME."""
    wanted = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if "PYTHONPATH" in os.environ:
        wanted["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return wanted


@pytest.fixture(scope="module")
def readable(place: Path) -> tuple[str, ...]:
    """What an ordinary user must reach to run our code."""
    folders = (str(place), str(TESTS.parent), sys.prefix, sys.base_prefix)
    return tuple(dict.fromkeys(folders)) if IS_ROOT else ()
