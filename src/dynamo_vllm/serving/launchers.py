"""Chooses how a worker's engine is started."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.engine.base import Launcher
    from dynamo_vllm.engine.settings import EngineSettings


def launcher(options: WorkerOptions, settings: EngineSettings) -> Launcher:
    """Imports nothing of the engines that are not asked for."""
    if options.engine == "fake":
        from dynamo_vllm.engine.fake.launch import launch as launch_fake
        from dynamo_vllm.engine.fake.spec import parse_spec

        return functools.partial(launch_fake, parse_spec(options.fake_engine))
    if options.omni:
        from dynamo_vllm.engine.omni.launch import launch as launch_omni

        return functools.partial(launch_omni, settings)
    from dynamo_vllm.engine.vllm.launch import launch

    return functools.partial(launch, settings)
