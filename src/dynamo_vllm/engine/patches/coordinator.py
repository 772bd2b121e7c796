"""Makes the data-parallel coordinator end together with its worker, not earlier and not later.

What is wrong: vLLM 0.30 leaves the coordinator running when its parent is killed. A Ctrl-C in a terminal goes
to the whole process group and ends the coordinator before the worker has drained. Engine cores have the same
defect, but they load our plugin (`plugin`); the coordinator loads no plugin.

What we do: the worker starts it through `run_coordinator`, which asks the kernel to end it with its parent.

It can go when vLLM's coordinator ends with its parent and ignores signals to the process group.
"""

from __future__ import annotations

import inspect
import re

from dynamo_vllm.engine.patches.patch import Where, in_vllm
from dynamo_vllm.engine.process.parent import end_with_parent

_UNGUARDED = "run_unguarded"


def apply() -> None:
    """Changes how coordinators are started from now on."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    if not hasattr(DPCoordinatorProc, _UNGUARDED):
        setattr(DPCoordinatorProc, _UNGUARDED, staticmethod(DPCoordinatorProc.run_coordinator))
        DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)


def run_coordinator(*args: object, **kwargs: object) -> None:
    """Runs in the coordinator's process: a forked one has the patched class, a spawned one vLLM's own."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    end_with_parent()
    getattr(DPCoordinatorProc, _UNGUARDED, DPCoordinatorProc.run_coordinator)(*args, **kwargs)


def still_needed() -> bool:
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    original = getattr(DPCoordinatorProc, _UNGUARDED, DPCoordinatorProc.run_coordinator)
    return re.search("parent|death", inspect.getsource(original)) is None


PATCHES = (
    in_vllm(
        name="coordinator-orphans",
        targets=("vllm.v1.engine.coordinator.DPCoordinatorProc.run_coordinator",),
        defect="the coordinator of data-parallel ranks outlives a worker that was killed",
        upstream="https://github.com/vllm-project/vllm/issues/55510",
        where=(Where.WORKER,),
        apply=apply,
        still_needed=still_needed,
    ),
)
