"""Keeps engines with NIXL on CPU from sharing one core.

What is wrong: the NIXL connector of vLLM 0.30 moves each engine onto the last core of the machine. Prompts
then wait for the decode engine to finish its answers, a second each.

What we do: report no cores to the connector, unless the user binds threads to cores.

It can go when the connector stays on the cores of its process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynamo_vllm.engine.patches.patch import on_cpu

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py"


def _no_cores(platform: type) -> list[object]:
    return []


_hidden: Any = classmethod(_no_cores)


def threads_are_not_bound() -> bool:
    from vllm import envs

    return bool(envs.VLLM_CPU_OMP_THREADS_BIND == "nobind")


def apply() -> None:
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.discover_numa_topology = _hidden


def still_needed() -> bool:
    import vllm

    return "os.sched_setaffinity(0, rsv_cores_for_kv)" in (Path(vllm.__path__[0]) / CONNECTOR).read_text()


PATCHES = (
    on_cpu(
        name="cpu-nixl-cores",
        targets=("vllm.platforms.cpu.CpuPlatform.discover_numa_topology",),
        defect="the connector moves every engine of the machine onto the same last core",
        upstream="https://github.com/vllm-project/vllm/issues/58033",
        apply=apply,
        still_needed=still_needed,
        only_if=threads_are_not_bound,
    ),
)
