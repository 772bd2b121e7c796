"""Applies our patches in each process of vLLM, which loads this as its plugin before the engine is made.

An engine core ends with its worker, and not before. vLLM 0.30 leaves it running when its parent is killed; it
would keep a GPU's memory for good. And a Ctrl-C in a terminal goes to the whole process group, where the core
would drop what the worker drains.

In the processes of vLLM-Omni, plain language models become stages too (`omni_text_stage`).
"""

from __future__ import annotations

import os

from dynamo_vllm.engine.patches import table
from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.engine.process.environment import OMNI_VARIABLE
from dynamo_vllm.engine.process.parent import end_with_parent


def register() -> None:
    end_with_parent()
    table.apply(Where.ENGINE)
    register_omni()


def register_omni() -> None:
    """In the processes of a pipeline, and in the worker that makes them."""
    if os.environ.get(OMNI_VARIABLE) != "1":
        return
    from dynamo_vllm.engine.patches import omni_text_stage

    omni_text_stage.register()
    table.apply(Where.OMNI)
