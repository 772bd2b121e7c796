"""Loaded by vLLM in each of its processes: mends that must be there before the engine is.

An engine core ends with its worker, and not before. vLLM 0.30 leaves it running when its parent is killed; it
would keep a GPU's memory for good. And a Ctrl-C in a terminal goes to the whole process group, where the core
would drop what the worker drains. The same holds for the coordinator of data-parallel ranks, which loads no
plugin: the worker starts it through `run_coordinator`.

NIXL's progress thread pauses between looks where a worker asks for it. NIXL 1.5 polls without a pause, which
takes a whole core per engine.

vLLM asks the kernel which cores there are, and needs no `lscpu` (`cpu_topology`).

Guides are compiled beside the engine's steps without being in their way (`grammar_threads`), and
one that takes too long for a token ends its request (`grammar_steps`).

KV events about prompt embeddings can be read by the router (`patches.kv_events`).

In the stages of vLLM-Omni, plain language models become stages (`omni_text_stage`), cancelled drawings end
and dead stages are let go (`patches.omni`).
"""

from __future__ import annotations

import os

from dynamo_vllm.engine.process.environment import NIXL_PAUSE_VARIABLE, OMNI_VARIABLE
from dynamo_vllm.engine.process.parent import end_with_parent

_UNGUARDED = "run_unguarded"


def register() -> None:
    end_with_parent()
    if pause := os.environ.get(NIXL_PAUSE_VARIABLE):
        calm_nixl(int(pause))
    from dynamo_vllm.engine.patches import cpu_topology, grammar_steps, grammar_threads
    from dynamo_vllm.engine.patches import kv_events as patches_kv_events

    cpu_topology.mend()
    grammar_steps.mend()
    grammar_threads.mend()
    patches_kv_events.mend()
    register_omni()


def register_omni() -> None:
    """In the processes of a pipeline, and in the worker that makes them."""
    if os.environ.get(OMNI_VARIABLE) != "1":
        return
    from dynamo_vllm.engine.patches import omni as patches_omni
    from dynamo_vllm.engine.patches import omni_text_stage

    omni_text_stage.register()
    patches_omni.mend()


def guard_coordinator() -> None:
    """In the worker: let a coordinator started from now on end with it too."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    if not hasattr(DPCoordinatorProc, _UNGUARDED):
        setattr(DPCoordinatorProc, _UNGUARDED, staticmethod(DPCoordinatorProc.run_coordinator))
        DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)


def run_coordinator(*args: object, **kwargs: object) -> None:
    """The coordinator's process: forked it has the changed class, spawned vLLM's own."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    end_with_parent()
    getattr(DPCoordinatorProc, _UNGUARDED, DPCoordinatorProc.run_coordinator)(*args, **kwargs)


def calm_nixl(pause_us: int) -> None:
    """Give every NIXL agent made from now on a pause between polls; a transfer under way wakes it earlier."""
    try:
        from nixl import _api
    except ImportError:
        return
    make_agent = _api.nixlBind.nixlAgent

    def agent(name: str, config: object) -> object:
        config.pthrDelay = pause_us  # type: ignore[attr-defined]
        return make_agent(name, config)

    _api.nixlBind.nixlAgent = agent
