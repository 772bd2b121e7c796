"""Options of a worker that limit the compiling of structured output."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.omni import OmniOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideOptions(OmniOptions):
    """A process that accepts schemas, regular expressions and grammars (structured output)."""

    guide_seconds: float = opt(
        2.0,
        "requests",
        "CPU time for compiling the schema, regex or grammar of a request; above that it gets a 400.",
        env="DYN_VLLM_GUIDE_SECONDS",
        metavar="SECONDS",
    )
    guide_memory_mb: int = opt(
        512,
        "requests",
        "Memory for compiling it; above that the request gets a 400.",
        env="DYN_VLLM_GUIDE_MEMORY_MB",
        metavar="MB",
    )
