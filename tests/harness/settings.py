"""Settings of an engine from the flags that a user would write."""

from __future__ import annotations

import dataclasses

from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.worker_plan import WorkerPlan
from dynamo_vllm.engine.settings import EngineSettings


def with_flags(settings: EngineSettings, *argv: str, headless: bool = False) -> EngineSettings:
    plan = WorkerPlan.of(WorkerOptions(model=settings.model, headless=headless), argv)
    return dataclasses.replace(settings, argv=plan.engine_argv, flags=plan.flags, node=plan.node)
