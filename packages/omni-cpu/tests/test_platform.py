"""The platform as vLLM-Omni sees it; no model is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

if not {"vllm-omni", "vllm-omni-cpu"} <= {found.metadata["Name"] for found in metadata.distributions()}:
    reason = "vLLM-Omni and vllm-omni-cpu are not installed"
    if os.environ.get("DYNAMO_VLLM_TEST_OMNI"):
        pytest.fail(f"DYNAMO_VLLM_TEST_OMNI is set, but {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """From a process of its own: vLLM-Omni changes vLLM's classes when it is imported."""
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("look.py"))], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_vllm_omni_chooses_it(seen: dict[str, Any]) -> None:
    assert seen["platform"] == "vllm_omni_cpu.platform.CpuOmniPlatform"


def test_it_answers_everything_a_platform_is_asked(seen: dict[str, Any]) -> None:
    assert seen["unanswered"] == []


def test_workers_are_those_of_vllm_for_cpu_with_runners_of_omni(seen: dict[str, Any]) -> None:
    for order in seen["runners"].values():
        assert order["is_cpu_worker"]
        names = order["bases"]
        assert (
            names.index("OmniGPUModelRunner") < names.index("CPUModelRunner") < names.index("GPUModelRunner")
        )


def test_attention_equals_that_of_torch(seen: dict[str, Any]) -> None:
    assert seen["attention_difference"] < 1e-6


def test_another_attention_is_refused_with_the_fix(seen: dict[str, Any]) -> None:
    assert seen["refused"] == (
        "diffusion attention backend FLASH_ATTN does not run on CPU; use TORCH_SDPA or leave it out"
    )


def test_outputs_are_handed_over_without_an_accelerator(seen: dict[str, Any]) -> None:
    assert seen["handed_over"] == [["good", None]]


def test_the_device_is_the_host(seen: dict[str, Any]) -> None:
    assert 0 < seen["free"] <= seen["total"]
    assert (seen["devices"], seen["device"], seen["device_type"]) == (1, "cpu", "cpu")
