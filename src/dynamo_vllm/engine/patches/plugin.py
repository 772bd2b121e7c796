"""Applies our patches in each process of vLLM, which loads this as a plugin before it creates the engine.

It also makes an engine core end together with its worker. vLLM 0.30 leaves the core running when its parent
is killed; it would hold the GPU's memory forever. A Ctrl-C in a terminal goes to the whole process group, and
the core would drop requests that the worker still drains.

vLLM also learns our connector for tiers by name: beside another connector it finds its statistics only so.

In the processes of vLLM-Omni it also registers plain language models as stages (`omni_text_stage`).
"""

from __future__ import annotations

import os

from dynamo_vllm.engine.patches import table
from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.engine.process.environment import OMNI_VARIABLE
from dynamo_vllm.engine.process.parent import end_with_parent
from dynamo_vllm.engine.tiers import CONNECTOR


def register() -> None:
    """Is the entry point that vLLM calls in each of its processes."""
    end_with_parent()
    table.apply(Where.ENGINE)
    register_tiers()
    register_omni()


def register_tiers() -> None:
    """Names our connector for tiers to vLLM, which imports it when an engine has tiers."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "dynamo_vllm.engine.tiers.connector", CONNECTOR)


def register_omni() -> None:
    """Prepares the processes of a vLLM-Omni pipeline, and the worker that starts them."""
    if os.environ.get(OMNI_VARIABLE) != "1":
        return
    from dynamo_vllm.engine.patches import omni_text_stage

    omni_text_stage.register()
    table.apply(Where.OMNI)
