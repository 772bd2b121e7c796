"""Prepares a process for vLLM: environment variables and patches first, then arguments and configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches import table
from dynamo_vllm.engine.process import environment as vllm_environment
from dynamo_vllm.engine.vllm import arguments as vllm_arguments
from dynamo_vllm.engine.vllm.compat import versions

if TYPE_CHECKING:
    from dynamo_vllm.engine.base import OnPhase
    from dynamo_vllm.engine.patches.patch import Where
    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.engine.vllm.arguments import Resolved
    from dynamo_vllm.engine.vllm.names import Config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Holds what vLLM is started with."""

    resolved: Resolved
    config: Config


def prepare(settings: EngineSettings, where: Where, on_phase: OnPhase) -> Prepared:
    """Prepares this process. vLLM reads variables at import, so other modules import it only after this."""
    on_phase("importing")
    vllm_environment.set_environment(settings)
    versions.warn_of_unproven()
    table.apply(where)
    resolved = vllm_arguments.resolve(settings)
    for fired in resolved.fired:
        logger.info("default %s", fired)
    config = vllm_arguments.create_config(resolved.args, settings)
    settings.on_resolved(vllm_arguments.described(resolved.args, config))
    on_phase(vllm_arguments.loading_phase(config))
    return Prepared(resolved, config)
