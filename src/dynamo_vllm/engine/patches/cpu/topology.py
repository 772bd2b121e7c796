"""Tells vLLM which cores the machine has, from /sys.

What is wrong: vLLM 0.30 runs `lscpu` through a shell for this; its CPU worker does not start on a machine
without one.

What we do: read the same from /sys.

It can go when vLLM reads /sys itself.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import Where, in_vllm

if TYPE_CHECKING:
    from vllm.utils.cpu_resource_utils import LogicalCPUInfo

SYSTEM = "/sys/devices/system"


def kernel_tells() -> bool:
    """vLLM counts in books on s390x."""
    return platform.system() == "Linux" and platform.machine() != "s390x"


def apply() -> None:
    from vllm.utils import cpu_resource_utils

    cpu_resource_utils._get_cpu_list = listed


def still_needed() -> bool:
    from vllm.utils import cpu_resource_utils

    return "lscpu --json --extended=CPU,CORE,NODE --online" in Path(cpu_resource_utils.__file__).read_text()


def listed() -> list[LogicalCPUInfo]:
    """In vLLM's class."""
    from vllm.utils.cpu_resource_utils import LogicalCPUInfo

    return [LogicalCPUInfo(*numbers) for numbers in cores()]


def cores(system: str = SYSTEM) -> list[tuple[int, int, int]]:
    """Logical core, physical core and memory node of each that is online, as lscpu lists them."""
    node_of = {
        number: int(folder.name.removeprefix("node"))
        for folder in Path(system, "node").glob("node[0-9]*")
        for number in _numbers(folder / "cpulist")
    }
    online = _numbers(Path(system, "cpu", "online")) or list(range(os.cpu_count() or 1))
    return [(number, _physical(system, number), node_of.get(number, 0)) for number in online]


def _physical(system: str, number: int) -> int:
    """Named by its first logical core: /sys numbers physical cores anew in every socket."""
    return min(_numbers(Path(system, "cpu", f"cpu{number}", "topology", "thread_siblings_list")) or [number])


def _numbers(path: Path) -> list[int]:
    """Those of a list such as 0-3,8; none where the kernel does not write it."""
    try:
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
        return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]
    except (OSError, ValueError):
        return []


PATCHES = (
    in_vllm(
        name="cpu-topology",
        targets=("vllm.utils.cpu_resource_utils._get_cpu_list",),
        defect="cores are counted with lscpu, which minimal machines do not have",
        where=(Where.ENGINE,),
        apply=apply,
        still_needed=still_needed,
        only_if=kernel_tells,
    ),
)
