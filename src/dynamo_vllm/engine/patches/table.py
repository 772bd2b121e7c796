"""Lists every patch of vLLM, vLLM-Omni, NIXL and others, and applies those that a process needs.

Imports none of these packages before a patch is applied; `dynamo-vllm check` shows the table.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches import (
    coordinator,
    decode_steps,
    grammar_steps,
    grammar_threads,
    guides,
    kv_events,
    nixl_pause,
    omni_diffusion,
    omni_store,
    process_context,
    prometheus_folder,
)
from dynamo_vllm.engine.patches.cpu import (
    amx,
    compiling,
    lora,
    nixl_cores,
    seeds,
    speculative,
    thread_count,
    topology,
)
from dynamo_vllm.engine.patches.patch import VLLM_VERSIONS, State, installed, is_within

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_vllm.engine.patches.patch import Patch, Where

logger = logging.getLogger(__name__)
PATCHES: tuple[Patch, ...] = (
    *prometheus_folder.PATCHES,
    *process_context.PATCHES,
    *coordinator.PATCHES,
    *guides.PATCHES,
    *nixl_pause.PATCHES,
    *topology.PATCHES,
    *grammar_steps.PATCHES,
    *grammar_threads.PATCHES,
    *kv_events.PATCHES,
    *decode_steps.PATCHES,
    *seeds.PATCHES,
    *nixl_cores.PATCHES,
    *speculative.PATCHES,
    *compiling.PATCHES,
    *lora.PATCHES,
    *thread_count.PATCHES,
    *amx.PATCHES,
    *omni_diffusion.PATCHES,
    *omni_store.PATCHES,
)
"""In the order in which they are applied."""
_applied: set[str] = set()
_warned: set[str] = set()


def apply(where: Where, patches: Iterable[Patch] = PATCHES) -> None:
    """Applies the patches that this process needs and does not have yet; its forks inherit them."""
    for patch in patches:
        if where not in patch.where or patch.name in _applied:
            continue
        state = patch.state()
        if state is State.APPLIED and patch.only_if():
            patch.apply()
            _applied.add(patch.name)
        elif state is State.OTHER_VERSION and patch.name not in _warned:
            _warned.add(patch.name)
            version = str(installed(patch.package))
            if patch.package != "vllm" or not is_within(version, VLLM_VERSIONS):
                found = f"{patch.package} {version}"
                logger.warning(
                    "%s is not applied: it is for %s, and %s is installed", patch.name, patch.versions, found
                )
