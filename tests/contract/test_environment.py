"""What `make venv` made is whole: the packages vLLM leans on import in a fresh process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


@pytest.mark.timeout(240)  # the first import of a fresh environment, on a busy machine
@pytest.mark.parametrize("module", ["torchvision", "torchaudio", "torchcodec"])
def test_companion_of_torch_imports_where_installed(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
