"""Tests that each patch is needed, changes its targets, and changes nothing when applied again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm

from dynamo_vllm.engine.patches.cpu import nixl_cores
from dynamo_vllm.engine.patches.patch import VLLM_VERSIONS, Patch, State, installed, is_within
from dynamo_vllm.engine.patches.table import PATCHES


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, Any]]:
    """Runs once for all tests, in a process that imports vLLM without patches."""
    program = str(Path(__file__).with_name("patches_probe.py"))
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_is_needed_and_applied_once(seen: dict[str, dict[str, Any]], patch: Patch) -> None:
    if (state := patch.state()) in (State.NOT_INSTALLED, State.OTHER_DEVICE):
        pytest.skip(str(state))
    version = str(installed(patch.package))
    if state is State.OTHER_VERSION and patch.package == "vllm" and is_within(version, VLLM_VERSIONS):
        pytest.skip(f"looked at: not needed with vLLM {version}")
    assert state is State.APPLIED, f"{patch.package} is another version now: look at {patch.module}"
    found = seen[patch.name]
    assert "error" not in found, f"what {patch.module} looks for is not there: {found['error']}"
    assert found["needed"], f"upstream has fixed it: remove {patch.module} ({patch.name})"
    assert found["wanted"]
    assert found["unchanged"] == [] and found["stays"]


def test_nobody_else_asks_for_the_cores_that_are_hidden_from_nixl() -> None:
    package = Path(vllm.__path__[0])
    users = [p for p in package.rglob("*.py") if "discover_numa_topology()" in p.read_text()]
    assert [str(p.relative_to(package)) for p in users] == [nixl_cores.CONNECTOR]
