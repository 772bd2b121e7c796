"""Gives vLLM the list of cores from /sys.

What is wrong: vLLM 0.30 gets the list from `lscpu`, through a shell. Its CPU worker does not start on a
machine without them.

What we do: read the same list from /sys.

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


def kernel_lists_cores() -> bool:
    """Returns whether /sys has the list; on s390x vLLM uses another unit (books)."""
    return platform.system() == "Linux" and platform.machine() != "s390x"


def apply() -> None:
    from vllm.utils import cpu_resource_utils

    cpu_resource_utils._get_cpu_list = listed


def still_needed() -> bool:
    from vllm.utils import cpu_resource_utils

    return "lscpu --json --extended=CPU,CORE,NODE --online" in Path(cpu_resource_utils.__file__).read_text()


def listed() -> list[LogicalCPUInfo]:
    """Returns the cores in vLLM's own class."""
    from vllm.utils.cpu_resource_utils import LogicalCPUInfo

    return [LogicalCPUInfo(*numbers) for numbers in cores()]


def cores(system: str = SYSTEM) -> list[tuple[int, int, int]]:
    """Returns the logical core, physical core and NUMA node of each online core, as lscpu lists them."""
    node_of = {
        number: int(folder.name.removeprefix("node"))
        for folder in Path(system, "node").glob("node[0-9]*")
        for number in _numbers(folder / "cpulist")
    }
    online = _numbers(Path(system, "cpu", "online")) or list(range(os.cpu_count() or 1))
    return [(number, _physical(system, number), node_of.get(number, 0)) for number in online]


def _physical(system: str, number: int) -> int:
    """Returns the first logical core of a physical core: /sys numbers physical cores per socket."""
    return min(_numbers(Path(system, "cpu", f"cpu{number}", "topology", "thread_siblings_list")) or [number])


def _numbers(path: Path) -> list[int]:
    """Parses a list such as 0-3,8; returns none if the file is missing."""
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
        only_if=kernel_lists_cores,
    ),
)
